package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"golang.org/x/sys/unix"

	"nodeproxy/inspect"
	"nodeproxy/internal/nstest"
)

var topBegan = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// topTraffic is a reading after some seconds.
func topTraffic(seconds int, ports ...inspect.PortTraffic) *inspect.Traffic {
	return &inspect.Traffic{At: topBegan.Add(time.Duration(seconds) * time.Second), Mode: "ipvs", Counted: true, Ports: ports}
}

func port(name string, connections, packets, bytes int64) inspect.PortTraffic {
	p := inspect.PortTraffic{Namespace: "shop", Name: name, Port: "http", Protocol: "TCP", Family: "IPv4", Connections: connections,
		PacketsIn: packets, PacketsOut: packets, BytesIn: bytes, BytesOut: bytes}
	if packets < 0 {
		p.BytesIn, p.BytesOut = -1, -1
	}
	return p
}

// TestTopRows: rates are those between two readings. A counter that began at zero again, and a Service that is new, count from zero; what
// is not counted stays so.
func TestTopRows(t *testing.T) {
	t.Parallel()
	rows := topRows(topTraffic(0, port("web", 100, 1000, 5000), port("reset", 100, 100, 100), port("cart", 7, -1, -1)),
		topTraffic(2, port("web", 110, 1100, 9000), port("reset", 4, 2, 2), port("new", 6, 0, 0), port("cart", 8, -1, -1)))
	for n, want := range []topRow{
		{connections: 5, packets: 100, bytes: 4000}, {connections: 2, packets: 2, bytes: 2}, {connections: 3}, {connections: 0.5, packets: -1, bytes: -1},
	} {
		if got := rows[n]; got.connections != want.connections || got.packets != want.packets || got.bytes != want.bytes {
			t.Errorf("%s: %v, want %v", got.Name, got, want)
		}
	}
	if rows := topRows(nil, topTraffic(0, port("web", 100, 1000, 5000))); rows[0].connections != 0 || rows[0].bytes != 0 {
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

// TestTopModel: keys sort, filter, scroll and end, and a failure shows above the last good reading.
func TestTopModel(t *testing.T) {
	t.Parallel()
	sync := inspect.Sync{Number: 3, Began: topBegan, Reasons: nil, Services: []inspect.ServiceChange{{Namespace: "shop", Name: "web\x1b[2J", Change: "added", EndpointsAdded: 2}},
		Took: inspect.Stages{Plan: 0.001, Write: 0.0115}}
	var m tea.Model = topModel{every: time.Second, sample: func() topSample { return topSample{} }}
	if m.Init() == nil {
		t.Error("nothing is asked at the start")
	}
	m, _ = m.Update(tea.WindowSizeMsg{Width: 100, Height: 20})
	m, _ = m.Update(topSample{traffic: topTraffic(0, port("api", 0, 0, 0), port("cart", 0, 0, 0), port("web", 0, 0, 0))})
	m, next := m.Update(topSample{traffic: topTraffic(1, port("api", 5, 30, 1e9), port("cart", 9, 20, 3000), port("web", 7, 40, 2000)), syncs: []inspect.Sync{sync}})
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
	m, _ = m.Update(topSample{err: errors.New("no nodeproxy answers")})
	if view := shows(m); !strings.Contains(view, "no nodeproxy answers") || order(view, "cart") != "cart" {
		t.Errorf("after a failure:\n%s", view)
	}
	for _, k := range []tea.KeyPressMsg{keys("q")[0], {Code: 'c', Mod: tea.ModCtrl}} {
		if _, quit := m.Update(k); quit == nil || quit() != tea.Quit() {
			t.Errorf("%s does not end it", k)
		}
	}
	// Columns that the mode does not count are left out, and a mode that counts nothing says why.
	m, _ = m.Update(topSample{traffic: topTraffic(2, port("web", 7, -1, -1))})
	if view := shows(m); strings.Contains(view, "PACKETS/s") || strings.Contains(view, "BYTES/s") || !strings.Contains(view, "CONN/s") {
		t.Errorf("only connections are counted:\n%s", view)
	}
	m, _ = m.Update(topSample{traffic: &inspect.Traffic{At: topBegan, Mode: "iptables"}})
	if !strings.Contains(shows(m), "--service-metrics") {
		t.Errorf("nothing is counted:\n%s", shows(m))
	}
}

// screen collects what a program writes to a terminal.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *screen) has(what string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Contains(s.text.String(), what)
}

// terminal returns both ends of a terminal of 120 columns and 30 lines.
func terminal(t *testing.T) (outer, inner *os.File) {
	t.Helper()
	fail := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	outer, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	fail(err)
	t.Cleanup(func() { outer.Close() })
	fd := int(outer.Fd())
	fail(unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	fail(err)
	fail(unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 30, Col: 120}))
	inner, err = os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)
	fail(err)
	t.Cleanup(func() { inner.Close() })
	return outer, inner
}

// TestTop: on a terminal, connections to a Service of a running nodeproxy show, and keys do what help says; elsewhere tables are printed.
func TestTop(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	a := newAsked(t)
	a.write(inspectedService)
	// The endpoint is this node, where nobody listens: a connection that is refused is one that is counted.
	nstest.Exec(t, "ip", "address", "add", "10.244.1.5/32", "dev", "lo")
	nstest.Exec(t, "ip", "route", "add", "10.96.0.0/16", "dev", "lo")
	if text, code := a.ask("top", "--count=1"); code == 0 || !strings.Contains(text, "no nodeproxy answers at "+a.socket) {
		t.Errorf("without a daemon: exit code %d, %s", code, text)
	}
	a.start("--mode=nftables", "--metrics-bind-address=", "--healthz-bind-address=")
	connect := func() { _ = exec.Command("curl", "--silent", "--max-time", "5", "http://10.96.0.10/").Run() } // It is refused.
	eventually(t, "connections are counted", func() bool {
		connect()
		text, code := a.ask("top", "--count=1", "--interval=100ms", "-o", "json")
		return code == 0 && strings.Contains(text, `"name": "web"`) && !strings.Contains(text, `"connections": 0`)
	})
	text, code := a.ask("top", "--count=2", "--interval=100ms")
	if code != 0 || strings.Count(text, "CONN/s") != 2 || strings.Contains(text, "PACKETS/s") || !strings.Contains(text, "default     web    added") {
		t.Errorf("plain: exit code %d, %s", code, text)
	}

	outer, inner := terminal(t)
	rows := uint16(30)
	// repainted has all of the screen written anew, and reports whether something is on it.
	shown := &screen{}
	repainted := func(what string) bool {
		rows ^= 1
		if err := unix.IoctlSetWinsize(int(outer.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: 120}); err != nil {
			t.Fatal(err)
		}
		return shown.has(what)
	}
	cmd := exec.Command("nodeproxy", "top", "--interval=200ms", "--socket="+a.socket)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = inner, inner, inner
	cmd.Env = append(os.Environ(), "TERM=vt100")
	nstest.EndWith(t, cmd)
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setsid, cmd.SysProcAttr.Setctty = true, true
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	go func() {
		b := make([]byte, 4096)
		for {
			n, err := outer.Read(b)
			shown.mu.Lock()
			shown.text.Write(b[:n])
			shown.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	press := func(keys string) {
		t.Helper()
		if _, err := outer.WriteString(keys); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the table is there", func() bool { connect(); return repainted("mode nftables") && repainted("default     web    TCP") })
	press("n")
	eventually(t, "it is sorted by name", func() bool { return repainted("by name") })
	press("/")
	press("nothing")
	eventually(t, "the filter shows", func() bool { return repainted("filter: nothing_") })
	press("\r") // Not Escape, which with what follows may be taken for another key.
	press("q")
	var err error
	eventually(t, "q ends it", func() bool {
		select {
		case err = <-ended:
			return true
		default:
			return false
		}
	})
	if err != nil {
		t.Errorf("top ends with %v", err)
	}
	eventually(t, "the former screen is brought back", func() bool { return shown.has("\x1b[?1049l") })
}

// TestTerminalIsNotAsked: a command writes to a terminal what it has to say, and nothing that the terminal would have to answer first.
func TestTerminalIsNotAsked(t *testing.T) {
	t.Parallel()
	outer, inner := terminal(t)
	cmd := exec.Command("nodeproxy", "version")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = inner, inner, inner
	cmd.Env = append(os.Environ(), "TERM=xterm-256color")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4096)
	n, err := outer.Read(b)
	if err != nil || string(b[:n]) != version+"\r\n" {
		t.Errorf("got %q, %v", b[:n], err)
	}
}
