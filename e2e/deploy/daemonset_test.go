package deploy

import (
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// daemonSet is the DaemonSet among manifests.
func daemonSet(t testing.TB, text string) *apps.DaemonSet {
	t.Helper()
	o := objects(t, text)["DaemonSet kube-system/nodeproxy"]
	if o == nil {
		t.Fatalf("no DaemonSet in\n%s", text)
	}
	raw, err := yaml.Marshal(o)
	require.NoError(t, err)
	var ds apps.DaemonSet
	require.NoError(t, yaml.UnmarshalStrict(raw, &ds))
	return &ds
}

// TestLeastPrivilege: no container is privileged, and each has these capabilities and no others. What the rest of this package
// shows to work, works with these.
func TestLeastPrivilege(t *testing.T) {
	t.Parallel()
	for _, overlay := range []string{"overlays/iptables", "overlays/ipvs", "overlays/nftables", "overlays/kubeadm", "overlays/migrate"} {
		want := map[string][]v1.Capability{"nodeproxy": {"NET_ADMIN", "NET_RAW"}, "modules": {"NET_ADMIN", "SYS_MODULE"}}
		if overlay == "overlays/nftables" {
			want["nodeproxy"] = []v1.Capability{"NET_ADMIN"}
		}
		pod := daemonSet(t, kustomized(t, overlay)).Spec.Template.Spec
		if !pod.HostNetwork || pod.HostPID || pod.HostIPC || pod.PriorityClassName != "system-node-critical" {
			t.Errorf("%s: the pod's namespaces or priority: %+v", overlay, pod)
		}
		if pod.SecurityContext.SeccompProfile.Type != v1.SeccompProfileTypeRuntimeDefault {
			t.Errorf("%s: seccomp profile %+v", overlay, pod.SecurityContext.SeccompProfile)
		}
		for _, c := range append(pod.InitContainers, pod.Containers...) {
			s := c.SecurityContext
			if *s.Privileged || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem {
				t.Errorf("%s, %s: %+v", overlay, c.Name, s)
			}
			if len(s.Capabilities.Drop) != 1 || s.Capabilities.Drop[0] != "ALL" {
				t.Errorf("%s, %s: drops %q, want ALL", overlay, c.Name, s.Capabilities.Drop)
			}
			if got := s.Capabilities.Add; !slices.Equal(got, want[c.Name]) {
				t.Errorf("%s, %s: adds %q, want %q", overlay, c.Name, got, want[c.Name])
			}
		}
	}
}

// TestNoKernelModules: without the init container that loads kernel modules, nothing asks for the capability, nor for the modules' directory, and nothing
// else is different.
func TestNoKernelModules(t *testing.T) {
	t.Parallel()
	want := daemonSet(t, charted(t, "--set=config.mode=ipvs"))
	pod := &want.Spec.Template.Spec
	if len(pod.InitContainers) != 1 || pod.Volumes[0].Name != "modules" {
		t.Fatalf("by default: init containers %+v, volumes %+v", pod.InitContainers, pod.Volumes)
	}
	pod.InitContainers, pod.Volumes = nil, pod.Volumes[1:]
	if got := daemonSet(t, charted(t, "--set=config.mode=ipvs,loadKernelModules=false")); !reflect.DeepEqual(got, want) {
		t.Errorf("it is\n%+v\nwant\n%+v", got, want)
	}
}
