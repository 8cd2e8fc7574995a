package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"time"

	"nodeproxy/e2e/measure"
	"nodeproxy/ui"
)

// page is where the page is that the daemon serves to browsers on its node.
const page = "http://127.0.0.1:10249"

// question is one that is asked again and again.
type question struct {
	name string
	goal time.Duration // for the median; 0 for none
	// args are those of a command. Without them it is a request, which is sent to the socket or, for a path of the page, to the page.
	args []string
	path string
}

// goal is that of get, explain and trace.
const goal = 200 * time.Millisecond

// questions about a Service of the cluster.
func questions(svc *measure.Service) []question {
	name := measure.Namespace + "/" + svc.Name
	return []question{
		{name: "version, which asks nothing", args: []string{"version"}},
		{name: "get services", goal: goal, args: []string{"get", "services", "--all-namespaces"}},
		{name: "get services NAME", goal: goal, args: []string{"get", "services", name}},
		{name: "get findings", goal: goal, args: []string{"get", "findings"}},
		{name: "explain", goal: goal, args: []string{"explain", name}},
		{name: "trace", goal: goal, args: []string{"trace", "outside", svc.Frontend().String()}},
		{name: "diff", args: []string{"diff"}},
		{name: "status", args: []string{"status"}},
		{name: "/v1/services", path: "/v1/services?counters"},
		{name: "/v1/traffic", path: "/v1/traffic"},
		{name: "/v1/history", path: "/v1/history"},
		{name: "/ui/v1/services", path: "/ui/v1/services"},
	}
}

// answer is what one question cost.
type answer struct {
	question
	took []time.Duration
	// own is the processor time of the command, and daemons that of the daemon, both for one of them on average.
	own, daemons time.Duration
	bytes        int64 // as they were sent, or printed
}

// askAll asks each question as often as the options say. All take turns.
func (l *lab) askAll(ctx context.Context, o options) ([]answer, error) {
	var out []answer
	for _, q := range questions(l.cluster.Services[o.services/2]) {
		out = append(out, answer{question: q})
	}
	for range o.rounds {
		for i := range out {
			if err := l.askOnce(ctx, &out[i]); err != nil {
				return nil, err
			}
		}
	}
	for i := range out {
		out[i].own /= time.Duration(o.rounds)
		out[i].daemons /= time.Duration(o.rounds)
	}
	return out, nil
}

func (l *lab) askOnce(ctx context.Context, a *answer) error {
	before, err := l.daemon.CPUTime()
	if err != nil {
		return err
	}
	begun := time.Now()
	if a.args != nil {
		cmd, printed, err := l.command(ctx, a.args...)
		if err != nil {
			return err
		}
		a.bytes, a.own = printed, a.own+cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime()
	} else if a.bytes, err = l.request(ctx, a.question); err != nil {
		return err
	}
	a.took = append(a.took, time.Since(begun))
	after, err := l.daemon.CPUTime()
	a.daemons += after - before
	return err
}

// command runs nodeproxy with arguments and the daemon's socket.
func (l *lab) command(ctx context.Context, args ...string) (cmd *exec.Cmd, printed int64, err error) {
	if args[0] != "version" {
		args = append(args[:len(args):len(args)], "--socket="+l.socket)
	}
	cmd = exec.CommandContext(ctx, l.binary, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := l.Node1().Do(cmd.Start); err != nil {
		return cmd, 0, fmt.Errorf("%q: %w", args, err)
	}
	err = cmd.Wait()
	exit := (*exec.ExitError)(nil)
	if errors.As(err, &exit) && exit.ExitCode() == 1 && stdout.Len() > 0 { // It has answered that there is a problem.
		err = nil
	}
	if err != nil {
		return cmd, 0, fmt.Errorf("%q: %w: %s", args, err, stderr.String())
	}
	return cmd, int64(stdout.Len()), nil
}

// request sends one, and returns how many bytes the answer had.
func (l *lab) request(ctx context.Context, q question) (int64, error) {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, DisableCompression: true,
		DialContext: func(_ context.Context, network, addr string) (conn net.Conn, err error) {
			if !strings.HasPrefix(q.path, ui.Path) {
				return net.Dial("unix", l.socket)
			}
			err = l.Node1().Do(func() error {
				conn, err = net.Dial(network, addr)
				return err
			})
			return conn, err
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, page+q.path, nil)
	if err != nil {
		return 0, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("%s: %s", q.path, resp.Status)
	}
	return io.Copy(io.Discard, resp.Body)
}
