package deploy

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// bootSystemd boots the root file system $1 in $2, with $3 as /etc and $4 as /usr/local, in a control group $5 of its own: systemd makes its
// groups below that one, of whatever version those of this machine are. Of its kernel settings, those of the network can be written: they
// are the namespace's.
const bootSystemd = `
mount --make-rprivate /
mount -t tmpfs tmpfs "$2"
mkdir "$2/upper" "$2/work" "$2/root"
mount -t cgroup2 cgroup2 "$2/root"
mkdir "$2/root/$5"
echo 0 >"$2/root/$5/cgroup.procs"
umount "$2/root"
mount -t overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" overlay "$2/root"
cd "$2/root"
mount --bind "$3" etc
mount --bind "$4" usr/local
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount --bind /proc/sys/net proc/sys/net
mount -t sysfs -o ro sysfs sys
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs dev
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mknod -m 666 dev/null c 1 3
mknod -m 666 dev/zero c 1 5
mknod -m 666 dev/full c 1 7
mknod -m 666 dev/random c 1 8
mknod -m 666 dev/urandom c 1 9
exec unshare --cgroup sh -ec 'mount -t cgroup2 cgroup2 sys/fs/cgroup; exec env -i PATH=/usr/sbin:/usr/bin container=other chroot . /lib/systemd/systemd'
`

// endSystemd removes the control group $2 by way of the directory $1.
const endSystemd = `
mount -t cgroup2 cgroup2 "$1"
[ ! -e "$1/$2" ] || find "$1/$2" -depth -type d -exec rmdir {} +
`

// host is node1 as a machine whose programs systemd starts.
type host struct {
	*harness.World
	dir, group string
	cmd        *exec.Cmd
}

// newHost makes node1's files, among which are those of this project's directory that its user copies.
func newHost(t *testing.T) *host {
	t.Helper()
	w := harness.New(t, harness.Options{})
	h := &host{World: w, dir: filepath.Join(w.Dir, "host"), group: "nodeproxy-" + filepath.Base(w.Dir)}
	neighbours, err := harness.NeighbourRoot()
	require.NoError(t, err)
	binary, err := harness.Binary()
	require.NoError(t, err)
	script := `mkdir -p "$1/root" "$1/usr/src/bin" "$1/usr/src/deploy" "$1/usr/bin" "$1/usr/sbin"
cp -a "$2/etc" "$1/etc"
cp "$3" "$1/usr/src/bin/nodeproxy"
cp -r "$4/deploy/systemd" "$1/usr/src/deploy"
echo node1 >"$1/etc/hostname"
echo 127.0.0.1 localhost node1 >"$1/etc/hosts"
rm -r "$1"/etc/systemd/system/*.wants # the services of the neighbours
ln -s /dev/null "$1/etc/systemd/system/systemd-sysctl.service"
`
	output(t, "sh", "-ec", script, "sh", h.dir, neighbours, binary, project(t))
	t.Cleanup(func() {
		if t.Failed() && h.cmd != nil {
			out, err := h.run("journalctl --no-pager -n 100; systemctl --no-pager list-units --failed; nft list ruleset | head -50")
			t.Logf("journal: %v\n%s", err, out)
		}
		require.NoError(t, h.powerFails())
	})
	return h
}

// file is a file of the host, below /etc or /usr/local.
func (h *host) file(path string) string {
	return filepath.Join(h.dir, strings.Replace(path, "/usr/local/", "usr/", 1))
}

func (h *host) write(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(h.file(path)), 0o755))
	require.NoError(t, os.WriteFile(h.file(path), []byte(text), 0o644))
}

func (h *host) copy(t *testing.T, from, to string) {
	t.Helper()
	text, err := os.ReadFile(from)
	require.NoError(t, err)
	h.write(t, to, string(text))
}

// boot waits until systemd has started all units that it was to start.
func (h *host) boot(t *testing.T) {
	t.Helper()
	neighbours, err := harness.NeighbourRoot()
	require.NoError(t, err)
	h.cmd = exec.Command("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child=SIGKILL",
		"sh", "-ec", bootSystemd, "sh", neighbours, h.file("/root"), h.file("/etc"), h.file("/usr/local/"), h.group)
	h.cmd.Stderr = os.Stderr
	require.NoError(t, h.Node1().Start(h.cmd))
	require.NoError(t, eventually(harness.Limit, func() error {
		state, err := h.run("systemctl is-system-running")
		if strings.TrimSpace(state) != "running" {
			return errors.Join(fmt.Errorf("systemd says %q", state), err)
		}
		return nil
	}))
}

// powerFails ends all that runs, and the kernel forgets what it had.
func (h *host) powerFails() error {
	if h.cmd == nil {
		return nil
	}
	_ = h.cmd.Process.Kill()
	_ = h.cmd.Wait()
	h.cmd = nil
	ended := eventually(harness.Limit, func() error { // not before the last process is gone
		_, err := attempt("unshare", "--mount", "sh", "-ec", endSystemd, "sh", h.file("/root"), h.group)
		return err
	})
	return errors.Join(ended, forget(h.Node1()))
}

// run runs a command of the host's user.
func (h *host) run(command string) (string, error) {
	room, err := harness.RoomOf(h.Node1().Netns, h.cmd)
	if err != nil {
		return "", err
	}
	return room.Output("cd /usr/local/src; " + command)
}

// do runs commands of the page.
func (h *host) do(t *testing.T, commands []string) {
	t.Helper()
	for _, command := range commands {
		const flag = "--cluster-cidr="
		command = strings.ReplaceAll(command, flag+"10.244.0.0/16", flag+harness.ClusterCIDR4.String()+","+harness.ClusterCIDR6.String())
		out, err := h.run(command)
		if err != nil {
			t.Fatalf("%s: %v\n%s", command, err, out)
		}
		t.Logf("%s\n%s", command, out[:min(len(out), 500)])
	}
}

func (h *host) serves(t *testing.T) {
	t.Helper()
	require.NoError(t, eventually(harness.Limit, func() error { return answers(h.World, harness.NFTables) }))
}

// nothingLeft checks that there is no rule, and no file that the page made.
func (h *host) nothingLeft(t *testing.T) {
	t.Helper()
	rules, err := h.Node1().Output("nft", "list", "ruleset")
	require.NoError(t, err)
	if rules != "" {
		t.Errorf("rules are left:\n%s", rules)
	}
	out, err := h.run("find / -xdev -name '*nodeproxy*' ! -path '/usr/local/src/*'; find /etc /usr/local /run -name '*nodeproxy*' ! -path '/usr/local/src/*'; grep -lx nodeproxy /proc/[0-9]*/comm || :")
	require.NoError(t, err)
	if out != "" {
		t.Errorf("left:\n%s", out)
	}
}

// TestSystemd: the commands of docs/install/bare-metal.md, with systemd and the unit, over manifests.
func TestSystemd(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	svc := webService()
	objects := append([]runtime.Object{h.NodeObject(h.Node1(), nil)}, harness.Objects(svc, h.Ready("n1a", "n2a")...)...)
	h.write(t, "/etc/nodeproxy/manifests/web.yaml", harness.YAML(t, objects...))
	page := commandsOf(t, "bare-metal")
	h.boot(t)
	h.do(t, page["Install"])
	h.serves(t)
	h.do(t, page["Check"])
	h.do(t, page["Change and upgrade"])
	h.serves(t)

	require.NoError(t, h.powerFails())
	h.boot(t)
	h.serves(t)
	log, err := h.run("journalctl --boot --unit=nodeproxy --no-pager --output=cat")
	require.NoError(t, err)
	if !strings.Contains(log, harness.InSync) || strings.Contains(log, "level=WARN") || strings.Contains(log, "level=ERROR") {
		t.Errorf("log:\n%s", log)
	}

	h.do(t, page["Uninstall"])
	h.nothingLeft(t)
}

// kubeProxyUnit and kubeProxyConfig are how a machine runs kube-proxy without an orchestrator of containers.
const kubeProxyUnit = `[Service]
ExecStart=/usr/local/bin/kube-proxy --config=/etc/kube-proxy/config.yaml
Restart=always
[Install]
WantedBy=multi-user.target
`

const kubeProxyConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: /etc/kube-proxy/kubeconfig}
mode: iptables
clusterCIDR: %s,%s
conntrack: {maxPerCore: 0}
`

// TestSystemdCluster: the same on a node of a cluster, where a kube-proxy service gives way to nodeproxy, and nodeproxy to kube-proxy, without a
// failed request. After a power failure, the node serves again when the API server answers.
func TestSystemdCluster(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	cp, err := cluster.Start(h.World, h.Nodes[2].Host)
	require.NoError(t, err)
	t.Cleanup(cp.Close)
	require.NoError(t, createService(t.Context(), cp, h.World, h.Nodes...))
	binaries, err := cluster.Binaries()
	require.NoError(t, err)
	output(t, "cp", filepath.Join(binaries, "kube-proxy"), h.file("/usr/local/bin/kube-proxy"))
	kubeconfig, _, err := cp.Install(t.Context())
	require.NoError(t, err)
	h.copy(t, kubeconfig, "/etc/nodeproxy/kubeconfig")
	kubeconfig, err = cp.Kubeconfig()
	require.NoError(t, err)
	h.copy(t, kubeconfig, "/etc/kube-proxy/kubeconfig")
	h.write(t, "/etc/kube-proxy/config.yaml", fmt.Sprintf(kubeProxyConfig, harness.ClusterCIDR4, harness.ClusterCIDR6))
	h.write(t, "/etc/systemd/system/kube-proxy.service", kubeProxyUnit)
	const manifests, unit = "--manifests=/etc/nodeproxy/manifests", "deploy/systemd/nodeproxy.service"
	text, err := os.ReadFile(project(t, unit))
	require.NoError(t, err)
	if !strings.Contains(string(text), manifests+"\n") {
		t.Fatalf("the unit has not %s:\n%s", manifests, text)
	}
	h.write(t, "/usr/local/src/"+unit, strings.Replace(string(text), manifests+"\n", "--kubeconfig=/etc/nodeproxy/kubeconfig\n", 1))
	page := commandsOf(t, "bare-metal")
	install := slices.DeleteFunc(page["Install"], func(command string) bool { return strings.Contains(command, " get ") })

	h.boot(t)
	h.do(t, []string{"systemctl enable --now kube-proxy"})
	h.serves(t)
	underLoad(t, h.World, "kube-proxy gives way to nodeproxy", func() {
		h.do(t, []string{"systemctl disable --now kube-proxy"})
		h.do(t, install)
		require.NoError(t, eventually(harness.Limit, func() error {
			out, err := h.run("nodeproxy status")
			if err != nil {
				err = fmt.Errorf("%w\n%s", err, out)
			}
			return err
		}))
		h.do(t, page["Check"])
		h.serves(t)
	})

	cp.APIServer.Kill()
	require.NoError(t, h.powerFails())
	h.boot(t)
	require.NoError(t, cp.StartAPIServer())
	h.serves(t)

	rollBack := page["Roll back"]
	last := rollBack[len(rollBack)-1]
	if !strings.Contains(last, "cleanup --nftables-only") {
		t.Fatalf("the last command to roll back is %s", last)
	}
	underLoad(t, h.World, "nodeproxy gives way to kube-proxy", func() {
		h.do(t, rollBack[:len(rollBack)-1])
		require.NoError(t, eventually(harness.Limit, func() error {
			for _, save := range []string{"iptables-save", "ip6tables-save"} {
				if rules, err := h.run(save); err != nil || !strings.Contains(rules, "-j DNAT") {
					return errors.Join(fmt.Errorf("%s has no rule of kube-proxy", save), err)
				}
			}
			return nil
		}))
		h.do(t, []string{last})
		h.serves(t)
	})
	tables, err := h.Node1().Output("nft", "list", "tables")
	require.NoError(t, err)
	if strings.Contains(tables, "nodeproxy") {
		t.Errorf("tables are left:\n%s", tables)
	}
}
