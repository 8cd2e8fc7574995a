package measure

import (
	"errors"
	"flag"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"
)

func TestTableJudgesByTheGoals(t *testing.T) {
	t.Parallel()
	value := func(v float64) float64 { return v }
	for _, c := range []struct {
		row          Row[float64]
		ours, theirs float64
		want         string
		missed       int
	}{
		{Row[float64]{}, 5, 1, "what 5 1 5", 0},
		{Row[float64]{Part: 20}, 4, 80, "what 4 80 1/20 <= 1/20 met", 0},
		{Row[float64]{Part: 20}, 4.1, 80, "what 4.1 80 1/19.5 <= 1/20 MISSED", 1},
		{Row[float64]{Most: 3}, 3, 1, "what 3 1 3 <= 3 met", 0},
		{Row[float64]{Most: 3}, 3.1, 9, "what 3.1 9 1/2.9 <= 3 MISSED", 1},
	} {
		var out strings.Builder
		table := NewTable(&out)
		c.row.What, c.row.Value, c.row.Show = "what", value, Short
		Compare(table, "title", []Row[float64]{c.row}, c.ours, c.theirs)
		_ = table.Flush()
		_, line, _ := strings.Cut(out.String(), "\n")
		got := strings.Join(strings.Fields(line), " ")
		if got != c.want || table.Missed != c.missed {
			t.Errorf("%d missed and the line %q, want %d and %q", table.Missed, got, c.missed, c.want)
		}
	}
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	values := []time.Duration{4, 1, 3, 2}
	for p, want := range map[float64]time.Duration{0: 1, 0.5: 3, 0.99: 4, 1: 4} {
		if got := Percentile(values, p); got != want {
			t.Errorf("percentile %v: %d, want %d", p, got, want)
		}
	}
	if values[0] != 4 {
		t.Errorf("the values are in another order now: %v", values)
	}
	for p, want := range map[float64]float64{0: 1, 0.5: 3, 0.9: 5, 1: 5} {
		if got := Percentile([]float64{5, 1, 4, 2, 3}, p); got != want {
			t.Errorf("percentile %v: %v, want %v", p, got, want)
		}
	}
}

func TestNth(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		of   string
		n    int
		want string
	}{{"10.96.0.0/16", 1, "10.96.0.1"}, {"10.96.0.0/16", 256, "10.96.1.0"}, {"10.128.0.0/10", 1<<22 - 1, "10.191.255.255"}} {
		if got := Nth(netip.MustParsePrefix(c.of), c.n); got.String() != c.want {
			t.Errorf("address %d of %s: %s, want %s", c.n, c.of, got, c.want)
		}
	}
}

// TestRun: the exit code says how the benchmark ended. It does not begin if its flags are wrong.
func TestRun(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		missed int
		err    error
		want   int
	}{{0, nil, 0}, {2, nil, 1}, {0, flag.ErrHelp, 0}, {0, errors.New("a test wants it so"), 2}, {2, errors.New("a test wants it so"), 2}} {
		if os.Geteuid() == 0 {
			if got := Run("measure", "nothing", nil, func() (int, error) { return c.missed, c.err }); got != c.want {
				t.Errorf("%d missed, %v: %d, want %d", c.missed, c.err, got, c.want)
			}
		}
		if c.err == nil {
			continue
		}
		begun := func() (int, error) {
			t.Errorf("it begins though parsing its flags failed: %v", c.err)
			return 0, nil
		}
		if got := Run("measure", "nothing", c.err, begun); got != c.want {
			t.Errorf("flags, %v: %d, want %d", c.err, got, c.want)
		}
	}
}

func TestNumbersAreShort(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		45678 * time.Microsecond: "45.7 ms", 999900 * time.Microsecond: "1000 ms",
		1650 * time.Second: "1650 s", 12345 * time.Nanosecond: "12.3 us", 0: "0 ms", 1234 * time.Millisecond: "1.23 s",
	} {
		if got := Duration(d); got != want {
			t.Errorf("%v is shown as %q, want %q", d, got, want)
		}
	}
	for _, c := range []struct {
		a, b float64
		want string
	}{{1, 20, "1/20"}, {2, 1, "2"}, {0, 1, "-"}, {1, 1234, "1/1234"}} {
		if got := Inverse(c.a, c.b); got != c.want {
			t.Errorf("%v by %v is shown as %q, want %q", c.a, c.b, got, c.want)
		}
	}
}

// TestFreshEndpoints: addresses are in their range and none comes twice, over the borders of bytes too.
func TestFreshEndpoints(t *testing.T) {
	t.Parallel()
	var o Objects
	seen := map[netip.Addr]bool{}
	for range 1 << 17 {
		a := o.freshEndpoint()
		if seen[a] || !EndpointRange.Contains(a) {
			t.Fatalf("%s is in use already, or not in %s", a, EndpointRange)
		}
		seen[a] = true
	}
}
