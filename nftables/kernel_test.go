package nftables

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"testing"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

func newBackend(t testing.TB) *Backend {
	t.Helper()
	b, err := New(Config{Families: plan.Families[:], MasqueradeBit: 14, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b
}

func TestTry(t *testing.T) {
	nstest.Enter(t)
	b := newBackend(t)
	c := plantest.Clusters().Example(3)
	if err := b.Sync(context.Background(), c.Plan, nil); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
	fmt.Println(string(out), err)
	os.WriteFile("/tmp/nfx/render.txt", []byte(Render(c.Plan, plan.IPv4, b.engines[0].options)), 0o644)
}
