package main

import (
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
)

// terminal returns both ends of a terminal of 120 columns and 30 lines.
func terminal(t *testing.T) (outer, inner *os.File) {
	t.Helper()
	fail := func(err error) {
		require.NoError(t, err)
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
	a.says(1, "top --count=1", "no nodeproxy answers at "+a.socket)
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
	shown := &logged{}
	repainted := func(what string) bool {
		rows ^= 1
		require.NoError(t, unix.IoctlSetWinsize(int(outer.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: 120}))
		return strings.Contains(shown.String(), what)
	}
	cmd := exec.Command("nodeproxy", "top", "--interval=200ms", "--socket="+a.socket)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = inner, inner, inner
	cmd.Env = append(os.Environ(), "TERM=vt100")
	nstest.EndWith(t, cmd)
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setsid, cmd.SysProcAttr.Setctty = true, true
	require.NoError(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	go func() { _, _ = io.Copy(shown, outer) }() // It ends with the terminal.
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
	eventually(t, "the former screen is brought back", func() bool { return strings.Contains(shown.String(), "\x1b[?1049l") })
}

// TestTerminalIsNotAsked: a command writes to a terminal what it has to say, and nothing that the terminal would have to answer first.
func TestTerminalIsNotAsked(t *testing.T) {
	t.Parallel()
	outer, inner := terminal(t)
	cmd := exec.Command("nodeproxy", "version")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = inner, inner, inner
	cmd.Env = append(os.Environ(), "TERM=xterm-256color")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	require.NoError(t, cmd.Run())
	b := make([]byte, 4096)
	n, err := outer.Read(b)
	if err != nil || string(b[:n]) != version+"\r\n" {
		t.Errorf("got %q, %v", b[:n], err)
	}
}
