package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/duration"

	"nodeproxy/inspect"
)

// self is what this daemon knows about itself.
func (d *daemon) self() inspect.Self {
	s := inspect.Self{
		Program: program(), Variant: d.backend.variant, Families: d.backend.Families(), Started: started, From: d.from,
		Neighbours: d.neighbours.all(), Waited: d.monitor.node.OldestChange(), Watches: d.watches(),
	}
	for _, f := range d.families {
		if !slices.Contains(s.Families, f) {
			s.Unserved = append(s.Unserved, f)
		}
	}
	for _, m := range d.monitor.node.Missing() {
		s.Missing = append(s.Missing, inspect.Missing(m))
	}
	if past := d.drift.recent(); len(past) > 0 {
		last := past[len(past)-1]
		text, state := "another program changed what was written to the kernel", "not repaired yet"
		if n := len(past); n > 1 {
			text += fmt.Sprintf(" %d times in the last %s, last", n, duration.HumanDuration(pastKept))
		}
		if last.Repaired {
			state = "repaired"
		}
		text += fmt.Sprintf(" %s ago: %s; it is %s", duration.HumanDuration(time.Since(last.When)), last.What, state)
		s.Neighbours = append(s.Neighbours, inspect.Neighbour{Kind: "change", What: text, Problem: !last.Repaired})
	}
	if why := d.rejected.Load(); why != nil {
		s.Rejected = *why
	}
	return s
}

func statusCommand() *cobra.Command {
	i, verify := &inspector{}, false
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the state of the nodeproxy of this node, and what is wrong",
		Long: "status shows on one screen which nodeproxy runs, whether it is ready and in sync, what it proxies, how long syncs take, whether\n" +
			"objects are current, what it has found, and which other programs interfere; then what is wrong, and what to do. If the socket gives\n" +
			"no answer, it asks the health check server, whose address is that of --config or --healthz-bind-address.\n\n" +
			"With --verify, it also has everything verified, within half a minute: the objects are listed anew and compared with those that are known,\n" +
			"the plan is made anew from them, and the kernel is compared with the plan. What differs is repaired, and counts as wrong. The result of\n" +
			"a verification of the last minutes is shown instead where there are many objects.\n" + runningHelp + `
Exit codes: 0 if nothing is wrong, 1 if something is, or no nodeproxy answers, 2 if the command line is wrong.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := i.client("").Status(cmd.Context())
			if err != nil {
				at, wrong := i.health()
				if wrong != nil {
					return wrong
				}
				if i.output == "" || i.output == "text" {
					fmt.Fprintf(cmd.OutOrStdout(), "There is no answer: %s.\n\n", strings.TrimSuffix(err.Error(), "."))
					writeFromOutside(cmd.Context(), cmd.OutOrStdout(), "/proc", at)
					return errProblem
				}
				return err
			}
			if verify {
				v, err := i.client("").Verify(cmd.Context())
				if err != nil {
					return err
				}
				s.SetVerification(v)
			}
			return i.show(cmd.OutOrStdout(), s, len(s.Wrong) > 0, func(string) error { return inspect.WriteStatus(cmd.OutOrStdout(), s) })
		},
	}
	i.addAs(cmd, "status", "text, json or yaml")
	cmd.Flags().BoolVar(&verify, "verify", false, "have objects, plan and kernel verified, and show what was compared and what differed")
	_ = cmd.Flags().MarkHidden("namespace") // It has no argument to complete.
	return cmd
}

// health returns the address at which a proxy with this configuration answers about its health; the zero AddrPort for none.
func (i *inspector) health() (netip.AddrPort, error) {
	_, cfg, err := effectiveConfig(&i.flags)
	if err != nil {
		return netip.AddrPort{}, err
	}
	at := cfg.Servers.Healthz
	switch at.Addr() {
	case netip.IPv4Unspecified():
		at = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), at.Port())
	case netip.IPv6Unspecified():
		at = netip.AddrPortFrom(netip.IPv6Loopback(), at.Port())
	}
	return at, nil
}

// writeFromOutside writes what can be seen of proxies on this node without asking a nodeproxy by its socket, and what to do. health is
// where they answer about their health.
func writeFromOutside(ctx context.Context, w io.Writer, proc string, health netip.AddrPort) {
	fmt.Fprintln(w, "What can be seen from here:")
	running := proxies(proc)
	if len(running) == 0 {
		fmt.Fprintln(w, "  - No process called nodeproxy or kube-proxy can be seen: none runs, or it is in another container or namespace of processes.")
	}
	for _, p := range running {
		fmt.Fprintf(w, "  - Process %s runs.\n", p)
	}
	if health.IsValid() {
		writeHealth(ctx, w, health)
	} else {
		fmt.Fprintln(w, "  - The configuration has no address at which to ask about health.")
	}
	fmt.Fprint(w, "\nWhat to do:\n"+
		"  - If nodeproxy runs in a container, ask there: kubectl -n kube-system exec ds/nodeproxy -- nodeproxy status\n"+
		"  - If systemd runs it: systemctl status nodeproxy; journalctl -u nodeproxy\n"+
		"  - If it has another --socket, name it. A nodeproxy that waits for another proxy answers only at its port for health: if that is\n"+
		"    another one, name its --config or its --healthz-bind-address.\n"+
		"  - If it should run and does not, its log says why; \"nodeproxy cleanup --dry-run\" lists the rules that are in the kernel.\n")
}

// writeHealth writes what answers at an address about the health of a proxy.
func writeHealth(ctx context.Context, w io.Writer, at netip.AddrPort) {
	missing, server, err := askHealth(ctx, "http://"+at.String()+"/readyz")
	switch {
	case err != nil:
		fmt.Fprintf(w, "  - Nobody answers about the health of a proxy at %s: %s.\n", at, err)
	case strings.HasPrefix(server, "nodeproxy/"):
		fmt.Fprintf(w, "  - At %s answers %s.\n", at, inspect.Printable(server))
		for _, m := range missing {
			fmt.Fprintf(w, "  - It is not ready (%s): %s.\n", inspect.Printable(m.Condition), inspect.Printable(m.Detail))
		}
	default:
		fmt.Fprintf(w, "  - At %s another proxy answers than nodeproxy, such as a kube-proxy.\n", at)
	}
}

// proxies lists the processes that are called like a proxy, without this one.
func proxies(proc string) []string {
	var out []string
	files, _ := filepath.Glob(filepath.Join(proc, "[0-9]*", "comm"))
	for _, file := range files {
		name, err := os.ReadFile(file)
		pid := filepath.Base(filepath.Dir(file))
		text := strings.TrimSpace(string(name))
		if err == nil && (text == "nodeproxy" || text == "kube-proxy") && pid != fmt.Sprint(os.Getpid()) {
			out = append(out, fmt.Sprintf("%s (%s)", pid, text))
		}
	}
	return out
}

// askHealth asks a proxy whether it is ready. It returns what is missing, and the name of the program.
func askHealth(ctx context.Context, url string) (missing []inspect.Missing, server string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		if inner := errors.Unwrap(err); inner != nil {
			err = inner
		}
		return nil, "", err
	}
	defer resp.Body.Close()
	var answer struct{ Missing []inspect.Missing }
	_ = json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&answer) // Another proxy has no such answer.
	return answer.Missing, resp.Header.Get("Server"), nil
}
