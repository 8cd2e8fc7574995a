package deploy

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// kubelet turns a pod into flags of ctr run, as the kubelet turns it into a request to the container runtime. It knows the fields
// that the DaemonSet uses, and the test fails if there is one more.
type kubelet struct {
	*containerd
	// configMaps are the ConfigMaps of the pod's namespace, serviceAccount the files of its ServiceAccount.
	configMaps     map[string]map[string]string
	serviceAccount map[string]string
}

// defaultCapabilities are what containers have if nothing is dropped.
var defaultCapabilities = []v1.Capability{
	"CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
	"NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE",
}

// run starts a container of a pod.
func (k *kubelet) run(t *testing.T, id string, pod *v1.PodSpec, c *v1.Container) *container {
	t.Helper()
	flags := k.security(t, pod, c.SecurityContext)
	env := k.environment(t, c)
	for name, value := range env {
		flags = append(flags, "--env="+name+"="+value)
	}
	mounts := append([]v1.VolumeMount{}, c.VolumeMounts...)
	const account = "/var/run/secrets/kubernetes.io/serviceaccount"
	flags = append(flags, mount(k.files(t, "token", k.serviceAccount), account, true))
	for _, m := range mounts {
		i := slices.IndexFunc(pod.Volumes, func(v v1.Volume) bool { return v.Name == m.Name })
		if i < 0 || m.SubPath != "" || m.MountPropagation != nil {
			t.Fatalf("volume mount %+v", m)
		}
		flags = append(flags, mount(k.source(t, &pod.Volumes[i]), m.MountPath, m.ReadOnly))
	}
	command := append(append([]string{}, c.Command...), c.Args...)
	for i := range command {
		for name, value := range env {
			command[i] = strings.ReplaceAll(command[i], "$("+name+")", value)
		}
	}
	return k.start(t, id, flags, command)
}

func mount(source, destination string, readOnly bool) string {
	options := "rbind:rw"
	if readOnly {
		options = "rbind:ro"
	}
	return fmt.Sprintf("--mount=type=bind,src=%s,dst=%s,options=%s", source, destination, options)
}

// security are the flags for the securityContext.
func (k *kubelet) security(t *testing.T, pod *v1.PodSpec, s *v1.SecurityContext) []string {
	t.Helper()
	if *s.RunAsUser != 0 || *s.RunAsGroup != 0 || s.SeccompProfile != nil || s.SELinuxOptions != nil || s.ProcMount != nil ||
		!pod.HostNetwork || pod.HostPID || pod.HostIPC || !slices.Equal(s.Capabilities.Drop, []v1.Capability{"ALL"}) {
		t.Fatalf("this test does not know what to do with %+v", s)
	}
	flags := []string{"--net-host"} // The node's hosts and resolv.conf are the machine's.
	if *s.Privileged {
		return append(flags, "--privileged")
	}
	if *s.AllowPrivilegeEscalation {
		flags = append(flags, "--allow-new-privs")
	}
	if *s.ReadOnlyRootFilesystem {
		flags = append(flags, "--read-only")
	}
	if pod.SecurityContext.SeccompProfile.Type == v1.SeccompProfileTypeRuntimeDefault {
		flags = append(flags, "--seccomp")
	}
	for _, c := range defaultCapabilities { // ctr drops what it has added, if both are said.
		if !slices.Contains(s.Capabilities.Add, c) {
			flags = append(flags, "--cap-drop=CAP_"+string(c))
		}
	}
	for _, c := range s.Capabilities.Add {
		flags = append(flags, "--cap-add=CAP_"+string(c))
	}
	return flags
}

// environment are the container's variables. Those of the Service "kubernetes" are there as in every pod, unless the pod says
// otherwise.
func (k *kubelet) environment(t *testing.T, c *v1.Container) map[string]string {
	t.Helper()
	env := map[string]string{"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
	for _, from := range c.EnvFrom {
		if from.ConfigMapRef == nil || from.Prefix != "" || !*from.ConfigMapRef.Optional {
			t.Fatalf("envFrom %+v", from)
		}
		for name, value := range k.configMaps[from.ConfigMapRef.Name] {
			env[name] = value
		}
	}
	for _, e := range c.Env {
		switch {
		case e.ValueFrom == nil:
			env[e.Name] = e.Value
		case e.ValueFrom.FieldRef != nil && e.ValueFrom.FieldRef.FieldPath == "spec.nodeName":
			env[e.Name] = k.node.Name
		default:
			t.Fatalf("variable %+v", e)
		}
	}
	return env
}

// source is what is mounted for a volume.
func (k *kubelet) source(t *testing.T, v *v1.Volume) string {
	t.Helper()
	switch {
	case v.ConfigMap != nil && k.configMaps[v.ConfigMap.Name] != nil:
		return k.files(t, v.Name, k.content(t, v.ConfigMap))
	case v.EmptyDir != nil:
		dir, err := os.MkdirTemp(k.dir, v.Name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir, 0o777); err != nil { // Whoever the container runs as may write there.
			t.Fatal(err)
		}
		return dir
	case v.HostPath != nil && *v.HostPath.Type == v1.HostPathFileOrCreate:
		if _, err := k.containerd.run("touch", v.HostPath.Path); err != nil {
			t.Fatal(err)
		}
		return v.HostPath.Path
	case v.HostPath != nil && *v.HostPath.Type == v1.HostPathDirectory:
		if info, err := os.Stat(v.HostPath.Path); err != nil || !info.IsDir() {
			t.Fatalf("%s is no directory: %v", v.HostPath.Path, err)
		}
		return v.HostPath.Path
	}
	t.Fatalf("volume %+v", v)
	return ""
}

// content are the files of a volume that is a ConfigMap.
func (k *kubelet) content(t *testing.T, source *v1.ConfigMapVolumeSource) map[string]string {
	t.Helper()
	data := k.configMaps[source.Name]
	if source.Items == nil {
		return data
	}
	out := map[string]string{}
	for _, item := range source.Items {
		text, ok := data[item.Key]
		if !ok {
			t.Fatalf("ConfigMap %s has no key %s", source.Name, item.Key)
		}
		out[item.Path] = text
	}
	return out
}

// files writes a volume of files as the kubelet does, also when its content changes: they are links through ..data to a
// directory, and what changes is where ..data leads.
func (k *kubelet) files(t *testing.T, name string, content map[string]string) string {
	t.Helper()
	volume := filepath.Join(k.dir, name)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(volume, 0o755))
	fresh, err := os.MkdirTemp(volume, "..2026_")
	must(err)
	must(os.Chmod(fresh, 0o755))
	for file, text := range content {
		must(os.WriteFile(filepath.Join(fresh, file), []byte(text), 0o644))
		if link := filepath.Join(volume, file); os.Symlink(filepath.Join("..data", file), link) != nil {
			_, err := os.Readlink(link)
			must(err)
		}
	}
	next, data := filepath.Join(volume, "..data_tmp"), filepath.Join(volume, "..data")
	old, _ := os.Readlink(data)
	must(os.Symlink(filepath.Base(fresh), next))
	must(os.Rename(next, data))
	if old != "" {
		must(os.RemoveAll(filepath.Join(volume, old)))
	}
	return volume
}
