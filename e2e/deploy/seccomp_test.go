package deploy

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/diff"

	"nodeproxy/e2e/harness"
)

// TestSeccompComponent: the component deploy/seccomp gives the container nodeproxy its profile, and no other container; so does the chart.
func TestSeccompComponent(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	relative := func(elements ...string) string {
		path, err := filepath.Rel(dir, project(t, elements...))
		require.NoError(t, err)
		return path
	}
	text := fmt.Sprintf("apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [%q]\ncomponents: [%q]\n",
		relative("deploy", "overlays", "ipvs"), relative("deploy", "seccomp"))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o644))
	overlay := objects(t, output(t, tool(t, "kubectl"), "kustomize", dir))
	chart := objects(t, charted(t, append([]string{"--set=seccompProfile.type=Localhost,seccompProfile.localhostProfile=nodeproxy.json"}, modes[1].flags...)...))
	if !reflect.DeepEqual(overlay, chart) {
		t.Errorf("the overlay with the component and the chart differ:\n%s", diff.Diff(overlay, chart))
	}
	refused(t, "missing property 'localhostProfile'", "--set=seccompProfile.type=Localhost")
	pod := daemonSet(t, asYAML(t, overlay["DaemonSet kube-system/nodeproxy"])).Spec.Template.Spec
	profile := pod.Containers[0].SecurityContext.SeccompProfile
	if profile == nil || profile.Type != v1.SeccompProfileTypeLocalhost || *profile.LocalhostProfile != "nodeproxy.json" {
		t.Errorf("the container has the profile %+v", profile)
	}
	if pod.InitContainers[0].SecurityContext.SeccompProfile != nil || pod.SecurityContext.SeccompProfile.Type != v1.SeccompProfileTypeRuntimeDefault {
		t.Error("the component changes more than the container nodeproxy")
	}
}

// underRunc runs in namespaces of its own, of whose processes it is the first. It starts the container, waits until its nodeproxy is in
// sync or has ended, runs commands in it as kubectl exec does, changes a manifest, and ends it. The arguments are a directory with
// config.json, the binary, the manifests, and a name for the
// container, which its control groups have too.
const underRunc = `
mount -t tmpfs tmpfs /run
mkdir -p /run/bundle/rootfs /run/nodeproxy
cp "$1/config.json" /run/bundle/ && cp "$2" /run/nodeproxy-binary && cp -r "$3" /run/manifests
mount --rbind / /run/bundle/rootfs
ip link set lo up && ip address add 192.168.77.11/24 dev lo && ip address add fd00:77::b/64 dev lo && ip route add 10.244.0.0/16 dev lo && ip route add 10.96.0.0/16 dev lo && ip route add fd00:10:244::/56 dev lo && ip -6 route add default dev lo
echo 1 >/proc/sys/net/ipv4/ip_forward && echo 1 >/proc/sys/net/ipv6/conf/all/forwarding
runc --root=/run/runc run --bundle=/run/bundle "$4" >/run/log 2>&1 &
pid=$!
saw() { # saw TEXT: waits for it, or for the end of nodeproxy, for a minute at most
	n=0
	until grep -q "$1" /run/log; do
		n=$((n + 1))
		[ $n -lt 600 ] && kill -0 $pid 2>/dev/null || return
		sleep 0.1
	done
}
saw 'in sync: '
for command in status 'explain shop/web' 'trace outside node:30080' 'trace outside node:30080 --live --for=200ms' history diff 'top --count=1' \
	'get services -A' 'support -o /run/support' 'cleanup --dry-run'; do
	kill -0 $pid 2>/dev/null || break
	runc --root=/run/runc exec --cap CAP_NET_ADMIN --cap CAP_NET_RAW "$4" /run/nodeproxy-binary $command >/run/out 2>&1
	echo "== nodeproxy $command: exit code $?"
	[ -s /run/out ] && head -c 4000 /run/out
done
if kill -0 $pid 2>/dev/null; then
	sed -i 's/status: "False"/status: "True"/' /run/manifests/pod-web-3.yaml
	saw 'endpoints +3/-0'
	runc --root=/run/runc exec "$4" grep -E '^(Seccomp|NoNewPrivs):' /proc/1/status
	runc --root=/run/runc kill "$4" TERM
fi
wait $pid
echo "== run: exit code $?"
cat /run/log
`

// runSeccomp runs that under a profile, with these flags besides, and returns what it printed.
func runSeccomp(t *testing.T, profile []byte, flags ...string) string {
	t.Helper()
	binary, err := harness.Binary()
	require.NoError(t, err)
	capabilities := []string{"CAP_NET_ADMIN", "CAP_NET_RAW"}
	type object = map[string]any
	bind := func(path, option string) object {
		return object{"destination": path, "type": "bind", "source": path, "options": []string{"rbind", option}}
	}
	config, err := json.Marshal(object{
		"ociVersion": "1.0.2",
		"root":       object{"path": "rootfs", "readonly": true},
		"process": object{
			"user": object{"uid": 0, "gid": 0}, "cwd": "/", "noNewPrivileges": true, "env": []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"},
			"capabilities": object{"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
			"args": append([]string{"/run/nodeproxy-binary", "run", "--manifests=/run/manifests", "--node-name=node1",
				"--cluster-cidr=10.244.0.0/16,fd00:10:244::/56", "--service-cidr=10.96.0.0/16,fd00:10:96::/112", "--reset-tcp",
				"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0"}, flags...),
		},
		"mounts": []object{
			{"destination": "/proc", "type": "proc", "source": "proc"},
			{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "mode=755"}},
			bind("/run", "rw"), bind("/sys", "ro"),
		},
		"linux": object{
			"namespaces": []object{{"type": "mount"}, {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}},
			"seccomp":    json.RawMessage(profile),
		},
	})
	require.NoError(t, err)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), config, 0o644))
	out, err := exec.Command("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "--propagation=private",
		"sh", "-c", underRunc, "seccomp", dir, binary, project(t, "examples"), fmt.Sprintf("nodeproxy-%d-%s", os.Getpid(), filepath.Base(filepath.Dir(dir)))).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

// TestSeccomp: nodeproxy and its commands work under the profile of deploy/seccomp, applied by runc; and it is the profile that they work
// under: without netlink sockets in it, nothing is programmed.
func TestSeccomp(t *testing.T) {
	t.Parallel()
	profile, err := os.ReadFile(project(t, "deploy", "seccomp", "nodeproxy.json"))
	require.NoError(t, err)
	for name, flags := range map[string][]string{
		"iptables nft":    {"--mode=iptables", "--iptables-backend=nft"},
		"iptables legacy": {"--mode=iptables", "--iptables-backend=legacy"},
		"nftables":        {"--mode=nftables"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out := runSeccomp(t, profile, flags...)
			for _, want := range []string{
				"endpoints +3/-0", "Seccomp:\t2", "NoNewPrivs:\t1", "== run: exit code 0", "== nodeproxy status: exit code 0",
				"== nodeproxy explain shop/web: exit code 0", "== nodeproxy trace outside node:30080: exit code 0", "== nodeproxy diff: exit code 0",
				"== nodeproxy trace outside node:30080 --live --for=200ms: exit code 1", "no first packet of such a connection passed", "== nodeproxy support -o /run/support: exit code 0", "== nodeproxy cleanup --dry-run: exit code 0",
			} {
				if !strings.Contains(out, want) {
					t.Errorf("%q is missing", want)
				}
			}
			for _, refused := range []string{"peration not permitted", "ad system call", "not implemented", "level=ERROR"} {
				if strings.Contains(out, refused) {
					t.Errorf("there is %q", refused)
				}
			}
			if t.Failed() {
				t.Logf("output:\n%s", out)
			}
		})
	}
	t.Run("without netlink", func(t *testing.T) {
		t.Parallel()
		const netlink = `"value": 16,`
		if strings.Count(string(profile), netlink) != 1 {
			t.Fatalf("the profile has no rule for netlink sockets:\n%s", profile)
		}
		out := runSeccomp(t, []byte(strings.Replace(string(profile), netlink, `"value": 17,`, 1)), "--mode=nftables")
		if !strings.Contains(out, "operation not permitted") || strings.Contains(out, "in sync: ") {
			t.Errorf("output:\n%s", out)
		}
	})
}
