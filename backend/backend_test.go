package backend

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"nodeproxy/kernel/drift"
	"nodeproxy/plan"
)

// slow is an engine whose Sync takes a while.
type slow struct {
	Comparison
	family plan.Family
	takes  time.Duration
	err    error
}

func (s *slow) Family() plan.Family { return s.family }

func (s *slow) Sync(context.Context, *plan.Plan, plan.Change) error {
	time.Sleep(s.takes) // how long this family takes
	s.Wrote(drift.Rule, 2)
	s.Compared, s.Found = s.family == plan.IPv6, drift.Found{{Kind: drift.Table, Object: string(s.family)}}
	return s.err
}

func (s *slow) CompareBeside(context.Context) (found drift.Found, again bool, err error) {
	time.Sleep(s.takes) // how long this family takes
	return drift.Found{{Kind: drift.Table, Object: string(s.family)}}, s.err != nil, s.err
}

// TestCompare: families are compared one after the other, and what was found and went wrong is reported once; an error leads to a Sync.
func TestCompare(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		failed := errors.New("failed")
		var reports []drift.Report
		b := &PerFamily[*slow]{Engines: []*slow{{family: plan.IPv4, takes: time.Second}, {family: plan.IPv6, takes: time.Second}},
			Compared: func(r drift.Report) { reports = append(reports, r) }}
		if b.Compare(t.Context()) || len(reports) != 1 || len(reports[0].Found) != 2 || reports[0].Took != 2*time.Second ||
			reports[0].Err != nil {
			t.Errorf("reports %v", reports)
		}
		b.Engines[1].err = failed
		if !b.Compare(t.Context()) || len(reports) != 2 || !errors.Is(reports[1].Err, failed) {
			t.Errorf("after an error: reports %v", reports)
		}
		ended, cancel := context.WithCancel(t.Context())
		if cancel(); b.Compare(ended) || len(reports) != 2 {
			t.Errorf("at the end: reports %v", reports)
		}
	})
}

// TestSync: each family took as long as its own engine, whether the engines wait for each other or not. What all of them found is
// reported once.
func TestSync(t *testing.T) {
	t.Parallel()
	for _, concurrent := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) { testSync(t, concurrent) })
	}
}

func testSync(t *testing.T, concurrent bool) {
	const takes = 300 * time.Millisecond
	failed := errors.New("no room")
	var reports []drift.Report
	b := &PerFamily[*slow]{
		Engines:    []*slow{{family: plan.IPv4, takes: takes}, {family: plan.IPv6, err: failed}},
		Concurrent: concurrent,
		Shared:     func(plan.Change) drift.Found { return drift.Found{{Kind: drift.Sysctl, Object: "shared"}} },
		Compared:   func(r drift.Report) { reports = append(reports, r) },
	}
	if err := b.Sync(t.Context(), nil, plan.Everything()); !errors.Is(err, failed) {
		t.Errorf("concurrent %t: error %v", concurrent, err)
	}
	if took := b.Took(); !maps.Equal(took, map[plan.Family]time.Duration{plan.IPv4: takes, plan.IPv6: 0}) {
		t.Errorf("concurrent %t: took %v, want %v for IPv4 and no time for IPv6", concurrent, took, takes)
	}
	if len(reports) != 1 || len(reports[0].Found) != 3 || !errors.Is(reports[0].Err, failed) || reports[0].Took != takes {
		t.Errorf("concurrent %t: reports %+v", concurrent, reports)
	}
	if w := b.Written(); len(w) != 1 || w[drift.Rule] != 4 {
		t.Errorf("concurrent %t: written %v, want 2 rules for each family", concurrent, w)
	}
	if b.Engines[1].Found != nil {
		t.Errorf("concurrent %t: the engine keeps what it found", concurrent)
	}
	b.Engines = b.Engines[:1] // It has not compared anything.
	if err := b.Sync(t.Context(), nil, plan.Everything()); err != nil || len(reports) != 1 {
		t.Errorf("concurrent %t: error %v, reports %+v", concurrent, err, reports)
	}
}

// TestOpen: a family that can't work is left out, and all of them are an error.
func TestOpen(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	lacking := map[plan.Family]bool{plan.IPv6: true}
	open := func(f plan.Family) (*slow, error) {
		if lacking[f] {
			return nil, errors.New("no such table")
		}
		return &slow{family: f}, nil
	}
	engines, err := Open("iptables", plan.Families[:], slog.New(slog.NewTextHandler(&log, nil)), open)
	b := &PerFamily[*slow]{Engines: engines}
	if !slices.Equal(b.Families(), []plan.Family{plan.IPv4}) || err != nil || !strings.Contains(log.String(), "no such table") {
		t.Errorf("families %v, %v, log %q", b.Families(), err, log.String())
	}
	lacking[plan.IPv4] = true
	if _, err := Open("iptables", plan.Families[:], nil, open); err == nil || strings.Count(err.Error(), "no such table") != 2 {
		t.Errorf("without families: %v", err)
	}
}
