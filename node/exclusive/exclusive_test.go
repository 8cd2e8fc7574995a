package exclusive

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/sockets"
	"nodeproxy/node/health"
	"nodeproxy/plan"
)

// actAs is the environment variable that makes this program one of the others below in place of running tests.
const actAs = "NODEPROXY_TEST_ACT_AS"

// others are programs that may run beside a nodeproxy. Each says "ready" when it is.
var others = map[string]func() error{
	"kube-proxy's health":  func() error { return serve("0.0.0.0:10256", kubeProxy()) },
	"health of IPv6":       func() error { return serve("[::]:10256", kubeProxy()) },
	"kube-proxy's metrics": func() error { return serve("127.0.0.1:10249", kubeProxy()) },
	"metrics that redirect": func() error {
		mux := http.NewServeMux()
		mux.Handle("/proxyMode", kubeProxy())
		mux.Handle("/", http.RedirectHandler("/metrics", http.StatusFound))
		return serve("127.0.0.1:10249", mux)
	},
	"another port": func() error { return serve("127.0.0.1:7777", kubeProxy()) },
	"a web server": func() error { return serve("0.0.0.0:10256", http.NotFoundHandler()) },
	"a nodeproxy that waits": func() error {
		node := health.NewNode(health.NodeConfig{Families: plan.Families[:]})
		node.WaitFor("kube-proxy")
		return serve("0.0.0.0:10256", node.Handler())
	},
	"a nodeproxy that waits elsewhere": func() error {
		node := health.NewNode(health.NodeConfig{Families: plan.Families[:]})
		node.WaitFor("kube-proxy")
		l, err := net.Listen("tcp", "127.0.0.2:10249")
		if err != nil {
			return err
		}
		go func() { _ = http.Serve(l, health.Debug{}.Handler()) }()
		return serve("127.0.0.2:10256", node.Handler())
	},
	"a nodeproxy without a claim": func() error {
		return serve("0.0.0.0:10256", health.NewNode(health.NodeConfig{Families: plan.Families[:]}).Handler())
	},
	"somebody silent": func() error {
		l, err := net.Listen("tcp", "0.0.0.0:10256")
		fmt.Println("ready")
		if err == nil {
			return sleep()
		}
		return errors.Join(err, l.Close())
	},
	"a nodeproxy": func() error {
		g := Guard{Log: slog.Default()}
		if other := g.Other(); other != nil {
			return errors.New(other.String())
		}
		fmt.Println("ready")
		return sleep()
	},
	"a name that nobody answers at": func() error {
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
		if err == nil {
			err = syscall.Bind(fd, &syscall.SockaddrUnix{Name: names.Socket})
		}
		fmt.Println("ready")
		if err == nil {
			return sleep()
		}
		return err
	},
	"one that looks": func() error {
		g := Guard{Log: slog.Default()}
		fmt.Println(g.Other())
		return g.Close()
	},
	"nobody of note": func() error { fmt.Println("ready"); return sleep() },
}

// sleep blocks for ever. An empty select is a deadlock where no thread of the program does anything else.
func sleep() error {
	for {
		_ = syscall.Pause()
	}
}

func TestMain(m *testing.M) {
	if act := others[os.Getenv(actAs)]; act != nil {
		fmt.Println(act())
		os.Exit(1)
	}
	answerTimeout = 10 * time.Second // No verdict depends on how busy this machine is.
	os.Exit(withPrograms(m))
}

// programs is a directory with a copy of this program: what runs this very file is no kube-proxy, whatever it is called.
var programs string

func withPrograms(m *testing.M) int {
	dir, err := os.MkdirTemp("/tmp", "exclusive-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	programs = dir
	self, err := os.ReadFile("/proc/self/exe")
	program := filepath.Join(dir, "program")
	// Users other than root have to get in, whatever the umask is.
	if err := errors.Join(err, os.Chmod(dir, 0o755), os.WriteFile(program, self, 0o755), os.Chmod(program, 0o755)); err != nil {
		panic(err)
	}
	return m.Run()
}

func serve(address string, h http.Handler) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	return http.Serve(l, h)
}

// kubeProxy answers as kube-proxy 1.36 does.
func kubeProxy() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"lastUpdated": "2026-11-21 12:00:00.1 +0000 UTC m=+9.1","currentTime": "2026-11-21 12:00:00.2 +0000 UTC m=+9.2", "nodeEligible": true}`)
	})
	mux.HandleFunc("/proxyMode", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "iptables") })
	return mux
}

// program starts another program, which is called by this name, in the namespace of this thread.
func program(t *testing.T, name, as string, uid uint32) *exec.Cmd {
	t.Helper()
	dir, err := os.MkdirTemp(programs, "")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	path := filepath.Join(dir, name)
	if err == nil {
		err = os.Symlink(filepath.Join(programs, "program"), path)
	}
	require.NoError(t, err)
	return run(t, exec.Command(path), as, uid)
}

// run starts a program and waits until it is ready.
func run(t *testing.T, cmd *exec.Cmd, as string, uid uint32) *exec.Cmd {
	t.Helper()
	cmd.Env = append(os.Environ(), actAs+"="+as)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	nstest.EndWith(t, cmd)
	out := nstest.Output(t, cmd)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	word := make([]byte, 256)
	if n, err := out.Read(word); err != nil || string(word[:n]) != "ready\n" {
		t.Fatalf("%s as %s: %q, %v", cmd.Path, as, word[:n], err)
	}
	return cmd
}

// guard is one whose log must stay empty, unless the test wants something in it.
func guard(t *testing.T) (*Guard, *strings.Builder) {
	log := &strings.Builder{}
	g := &Guard{Log: slog.New(slog.NewTextHandler(log, nil))}
	t.Cleanup(func() { _ = g.Close() })
	return g, log
}

// TestOther: who is waited for, and what is said of it.
func TestOther(t *testing.T) {
	t.Parallel()
	const nobody = 65534
	for _, tc := range []struct {
		name, as, want string // PID in want is the program's
		uid            uint32
		ports          []uint16
	}{
		{name: "kube-proxy", as: "kube-proxy's health", want: "kube-proxy (process PID, listens at [::]:10256)"},
		{name: "k3s", as: "health of IPv6", want: "k3s (process PID, listens at [::]:10256)"},
		{name: "kube-proxy", as: "kube-proxy's metrics", want: "kube-proxy (process PID, listens at 127.0.0.1:10249)"},
		{name: "proxy", as: "metrics that redirect", want: "proxy (process PID, listens at 127.0.0.1:10249)"},
		{name: "proxy", as: "another port", want: ""},
		{name: "proxy", as: "another port", ports: []uint16{7777}, want: "proxy (process PID, listens at 127.0.0.1:7777)"},
		{name: "httpd", as: "a web server", want: ""},
		{name: "sleep", as: "somebody silent", want: ""},
		{name: "kube-proxy", as: "somebody silent", want: "kube-proxy (process PID, listens at [::]:10256)"},
		{name: "nodeproxy", as: "a nodeproxy that waits", want: ""},
		{name: "nodeproxy", as: "a nodeproxy without a claim", want: "nodeproxy (process PID, listens at [::]:10256)"},
		{name: "anything", as: "a nodeproxy", want: "nodeproxy (process PID)"},
		{name: "kube-proxy", as: "nobody of note", want: "kube-proxy (process PID)"},
		{name: "kube-prox", as: "nobody of note", want: ""},
		// Who is not root can't be a proxy, and must not keep one from working.
		{name: "kube-proxy", as: "kube-proxy's health", uid: nobody, want: ""},
		{name: "kube-proxy", as: "nobody of note", uid: nobody, want: ""},
		{name: "anything", as: "a nodeproxy", uid: nobody, want: ""},
		{name: "anything", as: "a name that nobody answers at", uid: nobody, want: ""},
		// It may be just about to.
		{name: "anything", as: "a name that nobody answers at", want: "nodeproxy (its process can't be seen from here)"},
	} {
		t.Run(fmt.Sprintf("%s as %s %d %v", tc.name, tc.as, tc.uid, tc.ports), func(t *testing.T) {
			t.Parallel()
			nstest.Enter(t)
			cmd := program(t, tc.name, tc.as, tc.uid)
			g, log := guard(t)
			g.Ports = tc.ports
			want := strings.ReplaceAll(tc.want, "PID", fmt.Sprint(cmd.Process.Pid))
			for range 2 { // The second time, most of it is known.
				got := ""
				if other := g.Other(); other != nil {
					got = other.String()
				}
				if got != want {
					t.Errorf("got %q, want %q", got, want)
				}
			}
			squatter := tc.uid != 0 && tc.as != "kube-proxy's health" && tc.as != "nobody of note"
			if warned := strings.Count(log.String(), "another nodeproxy can't be detected"); squatter != (warned == 1) {
				t.Errorf("the log has:\n%s", log)
			}
		})
	}
}

// TestInPod: from a process namespace of its own, as a pod has it, others are seen all the same.
func TestInPod(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ as, want string }{
		{"kube-proxy's health", "another proxy (listens at [::]:10256)"},
		{"kube-proxy's metrics", "another proxy (listens at 127.0.0.1:10249)"},
		{"somebody silent", "another proxy (listens at [::]:10256)"},
		{"a web server", "<nil>"},
		{"a nodeproxy", "nodeproxy (its process can't be seen from here)"},
		{"nobody of note", "<nil>"},
	} {
		t.Run(tc.as, func(t *testing.T) {
			t.Parallel()
			nstest.Enter(t)
			program(t, "kube-proxy", tc.as, 0)
			cmd := exec.Command("unshare", "--pid", "--fork", "--mount-proc", filepath.Join(programs, "program"))
			cmd.Env = append(os.Environ(), actAs+"=one that looks")
			out, _ := cmd.CombinedOutput() // It exits with 1, as all that act do.
			if got, _, _ := strings.Cut(string(out), "\n"); got != tc.want {
				t.Errorf("got %q, want %q", out, tc.want)
			}
		})
	}
}

// TestUnit: with the capabilities that deploy/systemd leaves it, nodeproxy sees a kube-proxy that has all and answers at none of the ports.
func TestUnit(t *testing.T) {
	t.Parallel()
	unit, err := os.ReadFile("../../deploy/systemd/nodeproxy.service")
	require.NoError(t, err)
	_, line, _ := strings.Cut(string(unit), "\nCapabilityBoundingSet=")
	line, _, _ = strings.Cut(line, "\n")
	bounding := "-all"
	for _, name := range strings.Fields(line) {
		bounding += ",+" + strings.ToLower(strings.TrimPrefix(name, "CAP_"))
	}
	self, err := os.Executable() // Another file than the one that kube-proxy runs.
	require.NoError(t, err)
	nstest.Enter(t)
	proxy := program(t, "kube-proxy", "nobody of note", 0)
	cmd := exec.Command("setpriv", "--inh-caps=-all", "--bounding-set="+bounding, self)
	cmd.Env = append(os.Environ(), actAs+"=one that looks")
	out, _ := cmd.CombinedOutput() // It exits with 1, as all that act do.
	want := fmt.Sprintf("kube-proxy (process %d)", proxy.Process.Pid)
	if got, _, _ := strings.Cut(string(out), "\n"); got != want {
		t.Errorf("with %s: got %q, want %q", line, out, want)
	}
}

// TestSameProgram: between two processes of one program, the claim decides, even if they are called kube-proxy.
func TestSameProgram(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	self, err := os.Executable()
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "kube-proxy")
	require.NoError(t, os.Symlink(self, path))
	run(t, exec.Command(path), "nobody of note", 0)
	g, _ := guard(t)
	if other := g.Other(); other != nil {
		t.Errorf("waits for %v", other)
	}
}

// TestElsewhere: a proxy in another network namespace is not waited for.
func TestElsewhere(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	for _, as := range []string{"a nodeproxy", "kube-proxy's health"} {
		program(t, "kube-proxy", as, 0)
	}
	nstest.Enter(t)
	g, log := guard(t)
	if other := g.Other(); other != nil || log.Len() > 0 {
		t.Errorf("waits for %v; log: %s", other, log)
	}
}

// TestOwnSockets: a guard does not wait for its own program, which answers while it waits for another.
func TestOwnSockets(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	answerAsProxy(t)
	g, _ := guard(t)
	if other := g.Other(); other != nil {
		t.Errorf("waits for %v", other)
	}
}

// answerAsProxy lets this program answer as a proxy does.
func answerAsProxy(t *testing.T) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:10256")
	require.NoError(t, err)
	server := &http.Server{Handler: kubeProxy()}
	t.Cleanup(func() { _ = server.Close() })
	go func() { _ = server.Serve(l) }()
}

// TestWait: the wait ends soon after a proxy is killed, and each proxy that is waited for is reported once.
func TestWait(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	first := []*exec.Cmd{program(t, "nodeproxy", "a nodeproxy", 0), program(t, "kube-proxy", "kube-proxy's health", 0)}
	g, _ := guard(t)
	var reported []string
	killed := make(chan time.Time, len(first))
	err := g.Wait(t.Context(), func(p Proxy) error {
		reported = append(reported, p.Name)
		cmd := first[len(reported)-1]
		time.AfterFunc(3*pollEvery, func() {
			killed <- time.Now()
			_ = cmd.Process.Kill()
		})
		return nil
	})
	<-killed
	took := time.Since(<-killed)
	if err != nil || strings.Join(reported, " ") != "nodeproxy kube-proxy" {
		t.Errorf("reported %v, %v", reported, err)
	}
	t.Logf("it took %v from the end of the last one", took)
	late, _ := guard(t)
	if other := late.Other(); other == nil || other.PID != os.Getpid() {
		t.Errorf("after the wait, the claim is not this process's: %v", other)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*pollEvery)
	defer cancel()
	if err := late.Wait(ctx, func(Proxy) error { return nil }); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a wait that was given up: %v", err)
	}
	wrong := errors.New("it makes no sense to wait")
	if err := late.Wait(t.Context(), func(Proxy) error { return wrong }); !errors.Is(err, wrong) {
		t.Errorf("a wait that makes no sense: %v", err)
	}
	require.NoError(t, g.Close())
	if err := late.Claim(t.Context()); err != nil || late.claim == nil {
		t.Errorf("the claim was given back, and can't be had: %v", err)
	}
}

// TestWatch: a proxy that starts is reported once, its end once, and so again; never the watching process itself, and never
// a nodeproxy, which waits.
func TestWatch(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	answerAsProxy(t)
	g, log := guard(t)
	if other := g.Other(); other != nil {
		t.Fatalf("there is %v", other)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	coming := []string{"kube-proxy's metrics", "nobody of note"}
	var here *exec.Cmd
	var reported []string
	next := func() {
		if len(coming) == 0 {
			cancel()
			return
		}
		here = program(t, "kube-proxy", coming[0], 0)
		coming = coming[1:]
	}
	program(t, "nodeproxy", "a nodeproxy that waits elsewhere", 0)
	next()
	g.Watch(ctx, pollEvery, func(p *Proxy) {
		if p == nil {
			reported = append(reported, "gone")
			next()
			return
		}
		process := here.Process // By then, here may be the next one.
		reported = append(reported, strings.ReplaceAll(p.String(), fmt.Sprint(process.Pid), "PID"))
		time.AfterFunc(3*pollEvery, func() { _ = process.Kill() }) // It is seen some more times before.
	})
	want := []string{"kube-proxy (process PID, listens at 127.0.0.1:10249)", "gone", "kube-proxy (process PID)", "gone"}
	if !slices.Equal(reported, want) || log.Len() > 0 {
		t.Errorf("reported %q, want %q; log: %s", reported, want, log)
	}
}

// TestStopped: a proxy that is stopped for now goes on some time, so it is waited for.
func TestStopped(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	cmd := program(t, "anything", "a nodeproxy", 0)
	require.NoError(t, cmd.Process.Signal(syscall.SIGSTOP))
	g, _ := guard(t)
	if other := g.Other(); other == nil || other.PID != cmd.Process.Pid {
		t.Errorf("waits for %v, not for process %d", other, cmd.Process.Pid)
	}
}

// BenchmarkOther is what the look for other proxies costs a start where there is none.
func BenchmarkOther(b *testing.B) {
	nstest.Enter(b)
	for b.Loop() {
		g := Guard{Log: slog.Default()}
		if other := g.Other(); other != nil {
			b.Fatalf("there is %v", other)
		}
		require.NoError(b, g.Close())
	}
	b.ReportMetric(float64(len(sockets.PIDs())), "processes")
}
