package xtables

import (
	"context"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// TestChangesDuringSync: what another program does to a table while one of the other family is written is noticed, as that table may have
// been compared before; what is written itself is not.
func TestChangesDuringSync(t *testing.T) {
	nstest.Enter(t)
	var w Watch
	ours, other := findProgram(t, Legacy, plan.IPv4), findProgram(t, Legacy, plan.IPv6)
	w.Add(ours, names.NAT)
	w.Add(other, names.NAT)
	sh(t, "iptables-legacy -w -t nat -N EARLIER && ip6tables-legacy -w -t nat -N EARLIER")
	_, err := w.Open()
	require.NoError(t, err)
	t.Cleanup(w.probe.close)

	done := w.Writing()
	sh(t, "ip6tables-legacy -w -t nat -A OUTPUT -j EARLIER")
	require.NoError(t, ours.Restore(Text("*nat\n:KUBE-A - [0:0]\nCOMMIT\n")))
	done()
	assert.Equal(t, []string{"table nat (IPv6)"}, w.Changed())

	done = w.Writing()
	require.NoError(t, ours.Restore(Text("*nat\n-A KUBE-A -j RETURN\nCOMMIT\n")))
	done()
	assert.Empty(t, w.Changed())

	sh(t, "iptables-legacy -w -t nat -F KUBE-A")
	assert.Equal(t, []string{"table nat (IPv4)"}, w.Changed(), "fewer entries than before are told at once")
}

// TestToldDuringSync: what was noticed before a sync need not wait for a look between two syncs.
func TestToldDuringSync(t *testing.T) {
	nstest.Enter(t)
	var w Watch
	ours := findProgram(t, Legacy, plan.IPv4)
	w.Add(ours, names.NAT)
	sh(t, "iptables-legacy -w -t nat -N EARLIER")
	_, err := w.Open()
	require.NoError(t, err)
	t.Cleanup(w.probe.close)

	sh(t, "iptables-legacy -w -t nat -A EARLIER -j RETURN")
	done := w.Writing()
	require.NoError(t, ours.Restore(Text("*nat\n:KUBE-A - [0:0]\nCOMMIT\n")))
	assert.Equal(t, []string{"table nat (IPv4)"}, w.Changed())
	assert.Empty(t, w.Changed())
	done()
	assert.Empty(t, w.Changed())
}

// TestLockReleased: what a program of the legacy variant has done is noticed when it ends, not at the next look.
func TestLockReleased(t *testing.T) {
	nstest.Enter(t)
	t.Setenv("XTABLES_LOCKFILE", filepath.Join(t.TempDir(), "lock"))
	var w Watch
	w.Add(findProgram(t, Legacy, plan.IPv4), names.NAT)
	sh(t, "iptables-legacy -w -t nat -N EARLIER")
	follow, err := w.Open()
	require.NoError(t, err)
	w.every = time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	told := make(chan string, 1)
	var following sync.WaitGroup
	following.Go(func() { follow(ctx, func(why string) { told <- why }) })
	sh(t, "iptables-legacy -w -t nat -A EARLIER -j RETURN")
	assert.Equal(t, "another program has changed table nat (IPv4)", <-told)
	cancel()
	following.Wait()
}
