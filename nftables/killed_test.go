package nftables

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// killedVariable is set in the process that TestKilled kills: the transaction before which it waits for that, -1 for none. Number 0
// would be an empty transaction before the first, as a start over what is there can make.
const killedVariable = "NODEPROXY_TEST_KILLED"

// TestKilled: kill -9 during first programming, between two transactions or at a random moment, and there once or twice in a row, leaves
// Services that are whole, and the next start converges.
func TestKilled(t *testing.T) {
	p := plantest.Large(1500, 2)
	if text, is := os.LookupEnv(killedVariable); is {
		waits, err := strconv.Atoi(text)
		require.NoError(t, err)
		e, k := testEngine(t, plan.IPv4)
		e.most = 200
		k.fail = func(commit int) error {
			fmt.Println(commit)
			if commit == waits {
				time.Sleep(time.Hour) // until it is killed
			}
			return nil
		}
		_ = e.Sync(context.Background(), p, plan.Everything())
		return
	}
	nstest.Enter(t)
	partial := 0
	for round := range 8 {
		_ = Cleanup()
		between := round%2 == 0
		killDuringFirst(t, between)
		if round%4 == 3 {
			killDuringFirst(t, between)
		}
		e, _ := testEngine(t, plan.IPv4)
		have := elementsOf(t, e)
		l, all, _ := desired(p, plan.IPv4, e.options)
		n := 0
		for _, sp := range p.Sorted(plan.IPv4) {
			if _, is := have[id{set: services, key: nameOf(plan.IPv4, sp.Frontends[0])}]; !is {
				continue
			}
			n++
			mine := map[id]value{}
			l.fill(place(written{}, sp), mine, map[kind]bool{})
			for i := range mine {
				if have[i] != all[i] && i.set != clusterIPs {
					t.Fatalf("Service %s is there without %s of set %s", sp.Key, i.text(plan.IPv4), e.sets[i.set].Name)
				}
			}
		}
		if n > 0 && n < len(p.Services) {
			partial++
		} else if between {
			t.Errorf("killed between transactions with %d of %d Services", n, len(p.Services))
		}
		t.Logf("killed with %d of %d Services", n, len(p.Services))
		synced(t, e, p, plan.Everything())
		holds(t, e, p)
	}
	t.Logf("%d rounds ended in the middle", partial)
}

// killDuringFirst starts this program in the namespace of the test, and kills it between two of some 30 transactions, or at any time after
// one.
func killDuringFirst(t *testing.T, between bool) {
	t.Helper()
	at, waits := 3+rand.IntN(20), -1
	if between {
		waits = at
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestKilled$", "-test.timeout=4m")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", killedVariable, waits))
	nstest.EndWith(t, cmd)
	lines := bufio.NewScanner(nstest.Output(t, cmd))
	require.NoError(t, cmd.Start())
	for range at { // After an earlier kill, there may be fewer.
		lines.Scan()
	}
	assert.NoError(t, lines.Err(), "waiting for transaction %d", at)
	if !between {
		time.Sleep(rand.N(3 * time.Millisecond)) // It is killed at any time.
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}
