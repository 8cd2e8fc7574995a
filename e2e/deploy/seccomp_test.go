package deploy

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/e2e/harness"
)

// withSeccomp renders an overlay with the component deploy/seccomp.
func withSeccomp(t *testing.T, overlay string) string {
	t.Helper()
	dir := t.TempDir()
	relative := func(elements ...string) string {
		path, err := filepath.Rel(dir, project(t, elements...))
		must(t, err)
		return path
	}
	text := fmt.Sprintf("apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [%q]\ncomponents: [%q]\n",
		relative("deploy", "overlays", overlay), relative("deploy", "seccomp"))
	must(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o644))
	return output(t, tool(t, "kubectl"), "kustomize", dir)
}

// TestSeccomp: nodeproxy works under the profile of deploy/seccomp, and the profile is what it works under: without netlink sockets in
// it, nothing works.
func TestSeccomp(t *testing.T) {
	t.Parallel()
	narrow := daemonSet(t, withSeccomp(t, "ipvs")).Spec.Template.Spec
	if narrow.InitContainers[0].SecurityContext.SeccompProfile != nil || narrow.SecurityContext.SeccompProfile.Type != v1.SeccompProfileTypeRuntimeDefault {
		t.Error("the component changes more than the container nodeproxy")
	}
	for _, tc := range []struct {
		overlay string
		variant harness.Variant
	}{{"iptables", harness.NFT}, {"iptables", harness.Legacy}, {"nftables", harness.NFT}} {
		t.Run(tc.overlay+"/"+string(tc.variant), func(t *testing.T) {
			t.Parallel()
			d := deploy(t, "overlays/"+tc.overlay)
			d.ds = daemonSet(t, withSeccomp(t, tc.overlay))
			d.seccomp = project(t, "deploy", "seccomp")
			d.withoutNetlink(t, tc.variant)
			c := d.runs(t, tc.variant)
			d.changes(t, c, tc.variant)
			for _, command := range []string{
				"status", "explain e2e/web", "trace outside node:30080", "trace outside node:30080 --live --for=200ms", "history", "diff",
				"top --count=1", "support -o -", "cleanup --dry-run",
			} {
				args := append([]string{"tasks", "exec", "--exec-id=seccomp", c.id, "/usr/bin/nodeproxy"}, strings.Fields(command)...)
				out, err := d.ctr(args...)
				if strings.Contains(out, "operation not permitted") || strings.Contains(out, "bad system call") {
					t.Errorf("nodeproxy %s: %v\n%s", command, err, out)
				}
			}
			d.isReplaced(t, c, tc.variant)
		})
	}
}

// withoutNetlink starts a container under the profile without netlink sockets, which has to fail.
func (d *deployment) withoutNetlink(t *testing.T, variant harness.Variant) {
	t.Helper()
	profile, err := os.ReadFile(filepath.Join(d.seccomp, "nodeproxy.json"))
	must(t, err)
	const netlink = `"value": 16,`
	if strings.Count(string(profile), netlink) != 1 {
		t.Fatalf("the profile has no rule for netlink sockets:\n%s", profile)
	}
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "nodeproxy.json"), []byte(strings.Replace(string(profile), netlink, `"value": 17,`, 1)), 0o644))
	whole := d.seccomp
	d.seccomp = dir
	c := d.container(t, "without-netlink", nil, "--iptables-backend="+string(variant))
	if err := c.waitFor(20*time.Second, "operation not permitted"); err != nil {
		t.Errorf("without netlink: %v", err)
	}
	if out := c.output(); strings.Contains(out, harness.InSync) {
		t.Errorf("without netlink, in sync:\n%s", out)
	}
	select {
	case <-c.done:
	default:
		_ = c.stop()
	}
	d.seccomp = whole
}
