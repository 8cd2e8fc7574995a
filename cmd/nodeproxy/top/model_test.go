package top

import (
	"errors"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"

	"nodeproxy/inspect"
)

var began = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// traffic is a reading after some seconds.
func traffic(seconds int, ports ...inspect.PortTraffic) *inspect.Traffic {
	return &inspect.Traffic{At: began.Add(time.Duration(seconds) * time.Second), Mode: "ipvs", Counted: true, Ports: ports}
}

func port(name string, connections, packets, bytes int64) inspect.PortTraffic {
	p := inspect.PortTraffic{Namespace: "shop", Name: name, Port: "http", Protocol: "TCP", Family: "IPv4",
		Counters: inspect.Counters{Connections: connections, PacketsIn: packets, PacketsOut: packets, BytesIn: bytes, BytesOut: bytes}}
	if packets < 0 {
		p.BytesIn, p.BytesOut = -1, -1
	}
	return p
}

// TestRates: rates are those between two readings. A counter that began at zero again, and a Service that is new, count from zero; what
// is not counted stays so.
func TestRates(t *testing.T) {
	t.Parallel()
	rows := ratesOf(traffic(0, port("web", 100, 1000, 5000), port("reset", 100, 100, 100), port("cart", 7, -1, -1)),
		traffic(2, port("web", 110, 1100, 9000), port("reset", 4, 2, 2), port("new", 6, 0, 0), port("cart", 8, -1, -1)))
	for n, want := range []row{
		{connections: 5, packets: 100, bytes: 4000}, {connections: 2, packets: 2, bytes: 2}, {connections: 3}, {connections: 0.5, packets: -1, bytes: -1},
	} {
		if got := rows[n]; got.connections != want.connections || got.packets != want.packets || got.bytes != want.bytes {
			t.Errorf("%s: %v, want %v", got.Name, got, want)
		}
	}
	if rows := ratesOf(nil, traffic(0, port("web", 100, 1000, 5000))); rows[0].connections != 0 || rows[0].bytes != 0 {
		t.Errorf("before the second reading: %v", rows)
	}
}

// pressed returns what a model is after some keys.
func pressed(m tea.Model, keys ...tea.KeyPressMsg) tea.Model {
	for _, k := range keys {
		m, _ = m.Update(k)
	}
	return m
}

// keys are those of a text.
func keys(text string) []tea.KeyPressMsg {
	var out []tea.KeyPressMsg
	for _, r := range text {
		out = append(out, tea.KeyPressMsg{Code: r, Text: string(r)})
	}
	return out
}

func shows(m tea.Model) string { return m.View().Content }

// order returns the order in which names appear in a view; those that do not are left out.
func order(view string, names ...string) string {
	var out []string
	for line := range strings.Lines(view) {
		for _, name := range names {
			if strings.HasPrefix(line, "shop") && strings.Contains(line, " "+name+" ") {
				out = append(out, name)
			}
		}
	}
	return strings.Join(out, " ")
}

// TestModel: keys sort, filter, scroll and end, and a failure shows above the last good reading.
func TestModel(t *testing.T) {
	t.Parallel()
	sync := inspect.Sync{Number: 3, Began: began, Reasons: nil, Services: []inspect.ServiceChange{{Namespace: "shop", Name: "web\x1b[2J", Change: "added", EndpointsAdded: 2}},
		Took: inspect.Stages{Plan: 0.001, Write: 0.0115}}
	var m tea.Model = model{every: time.Second, sample: func() Sample { return Sample{} }}
	if m.Init() == nil {
		t.Error("nothing is asked at the start")
	}
	m, _ = m.Update(tea.WindowSizeMsg{Width: 100, Height: 20})
	m, _ = m.Update(Sample{Traffic: traffic(0, port("api", 0, 0, 0), port("cart", 0, 0, 0), port("web", 0, 0, 0))})
	m, next := m.Update(Sample{Traffic: traffic(1, port("api", 5, 30, 1e9), port("cart", 9, 20, 3000), port("web", 7, 40, 2000)), Syncs: []inspect.Sync{sync}})
	if next == nil {
		t.Error("it does not ask again")
	}
	view := shows(m)
	for _, want := range []string{"mode ipvs", "12.5ms", `web\x1b[2J`, "+2/-0", "CONN/s", "PACKETS/s", "2.0GB", "6.0KB", "q quit", "9.0"} {
		if !strings.Contains(view, want) {
			t.Errorf("there is no %q in\n%s", want, view)
		}
	}
	if n := strings.Count(view, "\n"); n != 19 {
		t.Errorf("%d lines for a screen of 20", n+1)
	}
	const up, down, enter, escape, backspace = tea.KeyUp, tea.KeyDown, tea.KeyEnter, tea.KeyEscape, tea.KeyBackspace
	for _, tt := range []struct {
		keys []tea.KeyPressMsg
		want string
	}{
		{nil, "cart web api"},
		{keys("p"), "web api cart"},
		{keys("b"), "api cart web"},
		{keys("t"), "cart web api"},
		{keys("n"), "api cart web"},
		{append(keys("n"), tea.KeyPressMsg{Code: down}), "cart web"},
		{append(keys("n"), tea.KeyPressMsg{Code: down}, tea.KeyPressMsg{Code: up}), "api cart web"},
		{append(append(keys("/wq"), tea.KeyPressMsg{Code: backspace}, tea.KeyPressMsg{Code: enter}), keys("n")...), "web"},
		{keys("/nothing"), ""},
		{append(append(keys("/w"), tea.KeyPressMsg{Code: escape}), keys("n")...), "api cart web"},
	} {
		if got := order(shows(pressed(m, tt.keys...)), "api", "cart", "web"); got != tt.want {
			t.Errorf("after %v: %s, want %s", tt.keys, got, tt.want)
		}
	}
	m, _ = m.Update(Sample{Err: errors.New("no nodeproxy answers")})
	if view := shows(m); !strings.Contains(view, "no nodeproxy answers") || order(view, "cart") != "cart" {
		t.Errorf("after a failure:\n%s", view)
	}
	for _, k := range []tea.KeyPressMsg{keys("q")[0], {Code: 'c', Mod: tea.ModCtrl}} {
		if _, quit := m.Update(k); quit == nil || quit() != tea.Quit() {
			t.Errorf("%s does not end it", k)
		}
	}
	// Columns that the mode does not count are left out, and a mode that counts nothing says why.
	m, _ = m.Update(Sample{Traffic: traffic(2, port("web", 7, -1, -1))})
	if view := shows(m); strings.Contains(view, "PACKETS/s") || strings.Contains(view, "BYTES/s") || !strings.Contains(view, "CONN/s") {
		t.Errorf("only connections are counted:\n%s", view)
	}
	m, _ = m.Update(Sample{Traffic: &inspect.Traffic{At: began, Mode: "iptables"}})
	if !strings.Contains(shows(m), "--service-metrics") {
		t.Errorf("nothing is counted:\n%s", shows(m))
	}
}
