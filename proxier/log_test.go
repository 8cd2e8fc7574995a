package proxier

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"nodeproxy/plan"
)

// lines is a log.
type lines struct{ text strings.Builder }

func (l *lines) at(level slog.Level) *slog.Logger {
	return slog.New(slog.NewTextHandler(&l.text, &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
}

// take returns the lines since the last call.
func (l *lines) take() string {
	defer l.text.Reset()
	return l.text.String()
}

// TestLog pins the lines about syncs: their messages say everything, and under churn there is one in a second.
func TestLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log, r := &lines{}, &recorder{start: time.Now(), takes: 100 * time.Millisecond}
		p, stop := start(t, Config{Backend: r, CompareEvery: time.Hour, Log: log.at(slog.LevelInfo)})
		expect := func(what string, want ...string) {
			t.Helper()
			synctest.Wait()
			if got := log.take(); got != strings.Join(append(want, ""), "\n") {
				t.Errorf("%s: got\n%swant\n%s", what, got, strings.Join(want, "\n"))
			}
		}
		p.Apply(batch("a", 80, true))
		time.Sleep(10 * time.Second)
		expect("the first", `level=INFO msg="in sync: the first sync, of 1 ServicePorts; it took 100ms, and was made because nodeproxy has started" took=100ms changed=all service-ports=1`)
		p.Apply(batch("b", 80, false))
		time.Sleep(10 * time.Second)
		expect("a change", `level=INFO msg="in sync: ns/b (new); it took 100ms, and was made because objects have changed" took=100ms changed=1 service-ports=2`)
		p.Suspect("chain X is gone")
		time.Sleep(10 * time.Second)
		expect("nothing new")
		for i := range int32(42) {
			p.Apply(batch(string(rune('a'+i%5)), 100+i, false))
			time.Sleep(59 * time.Millisecond) // never when a sync or a pause ends, which would leave open what is in the next sync
		}
		time.Sleep(10 * time.Second)
		synctest.Wait() // What was written before happened before what follows.
		got := strings.Split(strings.TrimSpace(log.take()), "\n")
		if len(got) != 4 || !strings.HasPrefix(got[0], `level=INFO msg="in sync: ns/a; it took`) {
			t.Errorf("churn for 2.5 s: %q", got)
		}
		for _, line := range got[1:] {
			if !strings.HasPrefix(line, `level=INFO msg="more syncs within a second changed ns/`) || !strings.Contains(line, " more Services, endpoints +0/-0\" syncs=") {
				t.Errorf("churn: %s", line)
			}
		}
		r.fail = 1
		p.Apply(batch("f", 80, false))
		time.Sleep(10 * time.Second)
		expect("a failure", `level=ERROR msg="sync failed; the kernel keeps its rules, without what is new of ns/f (new), and everything is compared and written again in 200ms: the kernel is busy" retry-in=200ms`,
			`level=INFO msg="in sync: ns/f (new); it took 100ms, and was made because the one before had failed" took=100ms changed=all service-ports=6`)
		p.Apply(batch("f", 81, false))
		p.Apply(batch("g", 81, false))
		time.Sleep(150 * time.Millisecond)
		p.Apply(batch("g", 82, false))
		time.Sleep(150 * time.Millisecond)
		stop()
		expect("the end sums up", `level=INFO msg="in sync: ns/f, ns/g (new); it took 100ms, and was made because objects have changed" took=100ms changed=2 service-ports=7`,
			`level=INFO msg="more syncs within a second changed ns/g, endpoints +0/-0" syncs=1 services=1`)
	})
}

// TestLogEach: at level debug, each sync has a line of its own.
func TestLogEach(t *testing.T) {
	t.Parallel()
	log := &lines{}
	l := &syncLog{log: log.at(slog.LevelDebug)}
	p := plan.New(plan.Node{}, plan.Settings{})
	r := Result{Reasons: []Reason{Drift, Rest}, Suspicion: "a set changed", Waiting: 5, Err: errors.New("")}
	for i := range 4 {
		r.Difference.Services = make([]ServiceDifference, i)
		l.synced(false, p, plan.Only(nil), r)
	}
	if got := log.take(); strings.Count(got, `msg="in sync: `) != 4 || strings.Count(got, "level=DEBUG") != 3 ||
		!strings.Contains(got, `"in sync: no Service has changed; it took 0s, and was made because another program may have changed something, and `+
			`a change was too large for one sync (a set changed); 5 changed ServicePorts are left to the next one"`) {
		t.Errorf("got %s", got)
	}
	l.end()
	if got := log.take(); !strings.Contains(got, "syncs=2") {
		t.Errorf("at the end: %s", got)
	}
}

// BenchmarkLog is what the line about a sync costs where syncs follow each other quickly.
func BenchmarkLog(b *testing.B) {
	l := &syncLog{log: slog.New(slog.DiscardHandler)}
	p := plan.New(plan.Node{}, plan.Settings{})
	r := Result{Difference: Difference{Services: []ServiceDifference{{Service: plan.Service{Namespace: "default", Name: "web"}, EndpointsAdded: 1}}}}
	b.ReportAllocs()
	for b.Loop() {
		l.synced(false, p, plan.Only(nil), r)
	}
	l.end()
}
