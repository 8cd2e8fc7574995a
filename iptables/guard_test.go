package iptables

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/backend"
	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// sh runs a shell command in the namespace of this thread.
func sh(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Errorf("%s: %v: %s", command, err, out)
	}
}

// TestProgramsThatHang: a program that does not end by itself is ended, also where something that it has started stays.
func TestProgramsThatHang(t *testing.T) {
	hangs := filepath.Join(t.TempDir(), "hangs")
	nstest.Script(t, hangs, "sleep 5 &\nexec sleep 1000\n")
	const limit = 100 * time.Millisecond
	u := &xtables.Program{Variant: xtables.NFT, Path: hangs, RestorePath: hangs, SavePath: hangs, RestoreTime: limit, SaveTime: limit}
	var refused *xtables.RestoreError
	if err := u.Restore(xtables.Text("*nat\nCOMMIT\n")); err == nil || errors.As(err, &refused) || !strings.Contains(err.Error(), "was ended") {
		t.Errorf("restore: %v", err)
	}
	b := &Backend{PerFamily: backend.PerFamily[*engine]{Engines: []*engine{{Writer: u.Writer(nil), family: plan.IPv4}}}}
	for name, read := range map[string]func() (uint64, error){"dropped": b.InvalidDropped, "node ports": b.LocalhostNodePorts()} {
		if _, err := read(); err == nil || !strings.Contains(err.Error(), "was ended") {
			t.Errorf("counters of %s: %v", name, err)
		}
	}
	u.SavePath = filepath.Join(t.TempDir(), "save")
	nstest.Script(t, u.SavePath, "echo '*nat'\nexec sleep 1000\n")
	if _, err := u.Save(t.Context(), names.NAT); err == nil || !strings.Contains(err.Error(), "was ended") {
		t.Errorf("save: %v", err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := u.Save(cancelled, names.NAT); !errors.Is(err, context.Canceled) {
		t.Errorf("save, cancelled: %v", err)
	}
}

// TestGuard: the guard of localhost node ports is put next to what the kubelet keeps in KUBE-FIREWALL, once.
func TestGuard(t *testing.T) {
	inVariants(t, func(t *testing.T, v xtables.Variant) {
		sh(t, "iptables-"+string(v)+" -N KUBE-FIREWALL; iptables-"+string(v)+" -A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP")
		p := plantest.Large(1, 1)
		p.Settings.LocalhostNodePorts = true
		for range 2 {
			e := realEngine(t, v, plan.IPv4)
			program(t, e, p, plan.Everything())
			held, err := e.Kernel.Save(context.Background(), names.Filter)
			require.NoError(t, err)
			want := []string{"-m mark --mark 0x8000/0x8000 -j DROP", localnetGuard()}
			if !slices.Equal(held[names.KubeletFirewall], want) {
				t.Errorf("KUBE-FIREWALL holds %q", held[names.KubeletFirewall])
			}
		}
		if readSysctl("net/ipv4/conf/all/route_localnet") != "1" {
			t.Error("route_localnet is not set")
		}
	})
}
