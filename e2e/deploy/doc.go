// Package deploy tests what is in the project's directory deploy: the manifests and the chart against a real API server, with
// the real helm and kubectl, and the image in a container made by containerd and runc with the rights of the DaemonSet.
package deploy
