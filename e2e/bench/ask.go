package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
	"nodeproxy/inspect"
	"nodeproxy/nftables"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/proxier"
	"nodeproxy/source/manifest"
	"nodeproxy/ui"
)

// The goals of scenario ask for medians: that of get, explain and trace, and for how long a question may keep a sync from what is known of
// the objects.
const (
	askGoal  = 200 * time.Millisecond
	holdGoal = 10 * time.Millisecond
)

// question is one that is asked again and again, and what it cost.
type question struct {
	name string
	goal time.Duration // for the median; 0 for none
	// args are those of a command. Without them it is a request for a path, which is sent to the socket or, for one of the page, to where
	// the daemon serves that to browsers on its node.
	args []string
	path string

	took []time.Duration
	// own is the processor time of the command, and daemons that of the daemon, both for one of them on average.
	own, daemons time.Duration
	bytes        int64 // as they were sent, or printed
}

// queries about a Service, which may have another name than the one that is known.
func queries(svc *service) (named, unknown, trace string) {
	of := func(name string) string { return "?" + url.Values{"namespace": {namespace}, "name": {name}}.Encode() }
	to := url.Values{"from": {"outside"}, "to": {svc.frontend().String()}, "protocol": {"TCP"}}
	return of(svc.name), of(svc.name + "x"), "?" + to.Encode()
}

// askLab is a node whose nodeproxy is asked.
type askLab struct {
	*manifestLab
	*options
	binary, socket string
	client         *inspect.Client // It keeps one connection.
}

// runQuestions measures what questions to a running nodeproxy cost, and whether they delay a sync: blocks of changes with and without
// questions take turns, and there are others beside a process that only takes processor time. What they differ by is what questions cost
// otherwise, such as by locks.
func runQuestions(ctx context.Context, o *options) (missed int) {
	fmt.Printf("# before the run: %s\n", machine.State())
	l := &askLab{options: o, binary: must(harness.Binary()), manifestLab: newManifestLab(nil, slices.Repeat([]int{2}, o.services[0])...)}
	defer func() { l.close(recover()) }()
	l.socket = filepath.Join(l.Dir, "socket")
	l.client = inspect.NewClient(l.socket)
	l.flags = append(l.flags, "--mode="+o.mode, "--socket="+l.socket, "--log-level=info")
	l.start()
	o.progress("%d Services are programmed in mode %s", o.services[0], o.mode)
	var questions, holds []question
	var changes [kinds]changeTimes
	others := meanwhile(func() { questions, holds, changes = l.measure(ctx) })
	o.progress("done; meanwhile %s", others)
	missed = printQuestions(os.Stdout, o, questions, holds, changes)
	o.ended()
	return missed
}

func (l *askLab) measure(ctx context.Context) (questions, holds []question, changes [kinds]changeTimes) {
	svc := l.manifests.services[l.options.services[0]/2]
	name := namespace + "/" + svc.name
	questions = []question{
		{name: "version, which asks nothing", args: []string{"version"}},
		{name: "get services", goal: askGoal, args: []string{"get", "services", "--all-namespaces"}},
		{name: "get services NAME", goal: askGoal, args: []string{"get", "services", name}},
		{name: "get findings", goal: askGoal, args: []string{"get", "findings"}},
		{name: "explain", goal: askGoal, args: []string{"explain", name}},
		{name: "trace", goal: askGoal, args: []string{"trace", "outside", svc.frontend().String()}},
		{name: "diff", args: []string{"diff"}},
		{name: "status", args: []string{"status"}},
		{name: "/v1/services", path: "/v1/services?counters"},
		{name: "/v1/traffic", path: "/v1/traffic"},
		{name: "/v1/history", path: "/v1/history"},
		{name: "/ui/v1/services", path: "/ui/v1/services"},
	}
	for range l.rounds {
		for i := range questions {
			l.askOnce(ctx, &questions[i])
		}
	}
	l.progress("all questions asked")
	holds = l.holds(svc)
	for range l.blocks {
		for kind := range kinds {
			stop := l.disturb(ctx, kind)
			err := attempt(func() {
				for range l.options.changes {
					l.changeOnce(ctx, &changes[kind])
				}
			})
			asked, failed := stop()
			changes[kind].asked += asked
			check(errors.Join(err, failed))
		}
	}
	return questions, holds, changes
}

func (l *askLab) askOnce(ctx context.Context, q *question) {
	before, begun := must(l.daemon.CPUTime()), time.Now()
	if q.args != nil {
		l.command(ctx, q)
	} else {
		q.bytes = must(l.request(ctx, q.path))
	}
	q.took = append(q.took, time.Since(begun))
	q.daemons += (must(l.daemon.CPUTime()) - before) / time.Duration(l.rounds)
}

// command runs nodeproxy with arguments and the daemon's socket.
func (l *askLab) command(ctx context.Context, q *question) {
	args := slices.Clone(q.args)
	if args[0] != "version" {
		args = append(args, "--socket="+l.socket)
	}
	cmd := exec.CommandContext(ctx, l.binary, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	check(l.Node1().Do(cmd.Start), fmt.Sprintf("%q", args))
	err := cmd.Wait()
	if cmd.ProcessState.ExitCode() != 1 || stdout.Len() == 0 { // Otherwise it has answered that there is a problem.
		check(err, fmt.Sprintf("%q", args), stderr.String())
	}
	q.bytes = int64(stdout.Len())
	q.own += (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()) / time.Duration(l.rounds)
}

// request sends one, and returns how many bytes the answer had.
func (l *askLab) request(ctx context.Context, path string) (int64, error) {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, DisableCompression: true,
		DialContext: func(_ context.Context, network, addr string) (net.Conn, error) {
			if !strings.HasPrefix(path, ui.Path) {
				return net.Dial("unix", l.socket)
			}
			return harness.In(l.Node1().Netns, func() (net.Conn, error) { return net.Dial(network, addr) })
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+harness.MetricsAddr.String()+path, nil)
	if err != nil {
		return 0, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("%s: %s", path, resp.Status)
	}
	return io.Copy(io.Discard, resp.Body)
}

// holds asks the questions over the same manifests within this process, where it can be seen how long each of them keeps the state from
// changing, at the longest: for so long a sync may have to wait. What the rest of an answer takes is not in it.
func (l *askLab) holds(svc *service) (out []question) {
	batch := must(manifest.Load(manifest.Config{Path: l.Manifests}))
	state := proxier.NewState(l.Node1().Name, plan.Settings{}, plan.Families[:], nil)
	state.Apply(batch)
	state.Update()
	var publisher plan.Publisher
	publisher.Publish(state.Plan(), plan.Everything())
	var longest time.Duration
	node := &inspect.Node{
		Mode:       l.mode,
		Programmed: publisher.Latest,
		History:    &inspect.History{},
		Self:       func() inspect.Self { return inspect.Self{} },
		View: func(read func(*proxier.State)) {
			begun := time.Now()
			read(state)
			longest = max(longest, time.Since(begun))
		},
		Machine: func(_, near *plan.Plan, f plan.Family, _ func(netip.Addr) bool) (*packetsim.Machine, error) {
			return nftables.Machine(near, f, nftables.Options{}), nil // Any mode's: the lock is not held meanwhile.
		},
	}
	named, unknown, trace := queries(svc)
	handler := inspect.Handler(func() *inspect.Node { return node })
	for _, q := range []struct {
		path, query string
		status      int
	}{
		{"/v1/services", "", http.StatusOK}, {"/v1/explain", named, http.StatusOK}, {"/v1/explain of an unknown Service", unknown, http.StatusNotFound},
		{"/v1/trace", trace, http.StatusOK}, {"/v1/findings", "", http.StatusOK}, {"/v1/status", "", http.StatusOK}, {"/v1/desired (diff)", "", http.StatusOK},
	} {
		h := question{name: q.path, goal: holdGoal}
		path, _, _ := strings.Cut(q.path, " ")
		for range l.rounds {
			longest = 0
			w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, path+q.query, nil)
			r.ProtoMinor = 0 // Then the answer does not begin with a status that the recorder would take for the last one.
			handler.ServeHTTP(w, r)
			if w.Code != q.status {
				check(fmt.Errorf("%s: %d %s", q.path, w.Code, w.Body))
			}
			h.took = append(h.took, longest)
		}
		out = append(out, h)
	}
	return out
}

// The kinds of blocks of changes.
const (
	quiet  = iota // nobody asks
	asking        // one question after the other is sent to the socket
	busy          // a process takes as much processor time as it gets, and asks nothing
	kinds
)

// stages are the parts of the time of a change: all of it, from before the manifest is in place until everything is written; then, as the
// daemon tells them, the wait until the sync begins, finding out what must be, with any wait for readers, and bringing the kernel to it.
var stages = [...]string{"file in place to written", "  of it, from arrival to the sync", "  planned, with the wait for readers", "  written"}

// changeTimes are what changes of one kind took.
type changeTimes struct {
	took  [len(stages)][]time.Duration
	asked int // questions that were answered meanwhile
}

// disturb begins what a block of changes is made beside; stop ends it.
func (l *askLab) disturb(ctx context.Context, kind int) (stop func() (asked int, err error)) {
	ctx, cancel := context.WithCancel(ctx)
	var asked int
	ended := make(chan error, 1)
	go func() {
		if kind == busy {
			_ = exec.CommandContext(ctx, "nice", "-n", "19", "sh", "-c", "while :; do :; done").Run() // It is killed.
		}
		named, _, trace := queries(l.manifests.services[0])
		paths := []string{"/v1/services", "/v1/explain" + named, "/v1/trace" + trace, "/v1/findings", "/v1/status", "/v1/desired", "/v1/traffic"}
		for ; kind == asking && ctx.Err() == nil; asked++ {
			if _, err := l.request(ctx, paths[asked%len(paths)]); err != nil && ctx.Err() == nil {
				ended <- err
				return
			}
		}
		ended <- nil
	}()
	return func() (int, error) {
		cancel()
		err := <-ended
		return asked, err
	}
}

// changeOnce replaces an endpoint, of another Service each time, and waits until the daemon says what that took.
func (l *askLab) changeOnce(ctx context.Context, into *changeTimes) {
	svc, _, replace := l.manifests.change()
	begun := time.Now()
	check(replace())
	for time.Since(begun) < harness.Limit {
		for _, s := range must(l.client.History(ctx, plan.Service{Namespace: namespace, Name: svc.name})) {
			if s.Began.Before(begun) {
				continue
			}
			if s.Error != "" {
				check(errors.New(s.Error), "service "+svc.name)
			}
			seconds := func(v float64) time.Duration { return time.Duration(v * float64(time.Second)) }
			all := s.Began.Sub(begun) + seconds(s.Took.Total())
			for i, took := range []time.Duration{all, seconds(s.Took.Wait), seconds(s.Took.Plan), seconds(s.Took.Write)} {
				into.took[i] = append(into.took[i], took)
			}
			return
		}
		time.Sleep(100 * time.Millisecond) // Rarely, as this is a question too.
	}
	check(fmt.Errorf("service %s: not programmed within %s", svc.name, harness.Limit))
}

// printQuestions prints what was measured, and returns how many goals are missed.
func printQuestions(w io.Writer, o *options, questions, holds []question, c [kinds]changeTimes) (missed int) {
	t := newTable(w)
	add := func(q question, middle ...string) {
		cells := []string{q.name}
		for _, p := range []float64{0, 0.5, 0.9} {
			cells = append(cells, duration(percentile(q.took, p)))
		}
		cells = append(cells, middle...)
		if q.goal > 0 {
			cells = append(cells, "<= "+duration(q.goal), t.verdict(percentile(q.took, 0.5) <= q.goal))
		} else {
			cells = append(cells, "", "")
		}
		t.line(cells...)
	}
	t.line(fmt.Sprintf("\nquestion, %d Services, mode %s", o.services[0], o.mode), "least", "p50", "p90", "CPU of command", "CPU of daemon",
		"bytes", "goal for p50", "")
	for _, q := range questions {
		add(q, duration(q.own), duration(q.daemons), fmt.Sprint(q.bytes))
	}
	t.line("\nholds what a sync needs", "least", "p50", "p90", "", "", "", "goal for p50", "")
	for _, q := range holds {
		add(q, "", "", "")
	}
	_ = t.Flush()
	missed = t.missed

	t = newTable(w)
	t.line(fmt.Sprintf("\n%d changes of each kind", len(c[quiet].took[0])), "quiet", "asking", "busy", "asking/quiet", "asking/busy")
	for stage, name := range stages {
		for i, p := range []float64{0.5, 0.99} {
			cells := []string{name + ", " + []string{"p50", "p99"}[i]}
			var v [kinds]float64
			for kind := range kinds {
				v[kind] = percentile(c[kind].took[stage], p).Seconds()
				cells = append(cells, seconds(v[kind]))
			}
			t.line(append(cells, times(v[asking]/v[quiet]), times(v[asking]/v[busy]))...)
		}
	}
	_ = t.Flush()
	fmt.Fprintf(w, "While asking, %d questions were answered. Busy is beside an endless loop at nice 19. p99 of fewer than 100 is the worst.\n",
		c[asking].asked)
	return missed
}
