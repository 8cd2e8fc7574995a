package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"nodeproxy/config"
	"nodeproxy/iptables/common"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/node/leftovers"
	"nodeproxy/plan"
)

const diffHelp = `diff prints what the nodeproxy of this node would change in the kernel right now, as a unified diff: - is what the kernel has, and +
what it would get. Without differences it prints nothing. With --mode, it prints what that mode would change. With --manifests,
--kubeconfig, --master or --config it prints what a nodeproxy with those objects or settings would change, so that a change can be
reviewed before it is rolled out. All other settings are then those of the running nodeproxy, if there is one and no flag sets any. Where
the file of --config does not say where objects come from, one of the others has to.

With --against=running, - is what the running nodeproxy wants instead of what the kernel has, so drift is left out.

Rules are as iptables-save prints them, virtual servers as "ipvsadm -Sn", sets as "ipset save", and elements of maps as "nft list". Only
what belongs to nodeproxy or a kube-proxy is shown. After @@ is the thing that differs, with the Services that its lines are for.

diff reads the kernel itself, beside the running nodeproxy, and changes nothing. It needs root.

Exit codes: 0 without differences, 1 with some, 2 for a wrong command line or any other trouble.`

func diffCommand() *cobra.Command {
	d := &differ{}
	cmd := &cobra.Command{
		Use:   "diff [[NAMESPACE/]SERVICE]",
		Short: "Print what nodeproxy would change in the kernel, now or with other manifests or in another mode",
		Long:  diffHelp,
		Args:  atMost(1, "one name"),
		RunE: func(cmd *cobra.Command, args []string) error {
			differs, err := d.run(cmd, args)
			var usage *usageError
			switch {
			case errors.As(err, &usage):
				return err
			case err != nil:
				return &usageError{err} // 1 would mean that there are differences.
			case differs:
				return errProblem
			}
			return nil
		},
	}
	d.addFlags(cmd, "diff")
	cmd.Flags().StringVarP(&d.namespace, "namespace", "n", "default", "namespace of a Service that is named without one")
	cmd.Flags().StringVar(&d.against, "against", "kernel", "what to compare with: kernel or running")
	cmd.Flags().StringVar(&d.color, "color", "auto", "whether to color the output: auto, always or never")
	cmd.Flags().BoolVar(&d.stat, "stat", false, "print only how much differs, by kind")
	return cmd
}

// differ is one run of diff.
type differ struct {
	inspector
	against, color string
	stat           bool
}

// side is one of the two states that are compared.
type side struct {
	name string
	// cfg has the settings that rules depend on besides the plan.
	cfg *config.Config
	// desired is nil for the kernel.
	desired  *plan.Plan
	families []plan.Family
}

func (d *differ) run(cmd *cobra.Command, args []string) (differs bool, err error) {
	only, known := "", func(*side) bool { return true }
	svc, err := d.service(args)
	if err != nil {
		return false, err
	}
	if len(args) > 0 {
		only = svc.String()
		known = func(s *side) bool { return s.desired != nil && len(s.desired.KeysOf(svc)) > 0 }
	}
	if err := oneOf("against", d.against, enumerated["against"]); err != nil {
		return false, err
	}
	color, err := d.colored(cmd.OutOrStdout())
	if err != nil {
		return false, err
	}
	from, to, err := d.sides(cmd)
	if err != nil {
		return false, err
	}
	out := bufio.NewWriter(cmd.OutOrStdout())
	printer := &drift.Unified{W: out, From: from.name, To: to.name, Color: color}
	total := &diffStat{}
	hunks, err := compareSides(cmd.Context(), from, to)
	for _, h := range hunks {
		if only != "" && !slices.Contains(h.Services, only) {
			continue
		}
		differs = true
		if d.stat {
			total.add(h)
		} else if failure := printer.Print(h); failure != nil {
			err = failure
			break // The others would fail too.
		}
	}
	if err == nil && !differs && !known(from) && !known(to) {
		err = fmt.Errorf("no Service %s is proxied here, and the kernel has nothing for it", only)
	}
	if err == nil && d.stat {
		err = total.print(out)
	}
	if err == nil && d.incomplete {
		err = errIncomplete
	}
	return differs, errors.Join(err, out.Flush())
}

func (d *differ) colored(w io.Writer) (bool, error) {
	if d.color == "auto" {
		f, ok := w.(*os.File)
		return ok && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && term.IsTerminal(int(f.Fd())), nil
	}
	return d.color == "always", oneOf("color", d.color, enumerated["color"])
}

// objectFlags say where objects are from. takenOver are the flags that may be given with them; all other settings are the running nodeproxy's.
var (
	objectFlags = []string{"manifests", "kubeconfig", "master", "config"}
	takenOver   = []string{"manifests", "kubeconfig", "master", "mode", "proxy-mode", "socket", "against", "color", "stat", "namespace",
		"log-level", "v", "logging-format", "kube-api-qps", "kube-api-burst", "kube-api-content-type"}
)

// sides reads the two states.
func (d *differ) sides(cmd *cobra.Command) (from, to *side, err error) {
	own := slices.ContainsFunc(objectFlags, d.given)
	others := ""
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if !slices.Contains(takenOver, f.Name) {
			others = f.Name
		}
	})
	if !own && others != "" {
		return nil, nil, &usageError{fmt.Errorf("--%s: without --manifests, --kubeconfig, --master or --config, only --mode may differ from what the running "+
			"nodeproxy has", others)}
	}
	mode := d.mode(cmd)
	if mode != "" {
		if err := oneOf("mode", mode, config.Modes()); err != nil {
			return nil, nil, err
		}
	}
	to = &side{name: "nodeproxy"}
	if own {
		if to.cfg, err = d.flags.Config(); err != nil {
			return nil, nil, &usageError{err}
		}
		to.name = cmp.Or(to.cfg.Manifests, "cluster")
	}
	var running *side
	if others == "" || d.against == "running" {
		if running, err = d.running(cmd); err != nil && (!own || d.against == "running") {
			return nil, nil, err
		}
	}
	if running != nil && others == "" {
		settings := *running.cfg
		if settings.Mode = cmp.Or(mode, settings.Mode); own {
			settings.Manifests, settings.API, settings.LogLevel, settings.LogFormat = to.cfg.Manifests, to.cfg.API, to.cfg.LogLevel, to.cfg.LogFormat
		}
		to.cfg = &settings
	}
	if own {
		state, err := readState(cmd.Context(), to.cfg, cmd.InOrStdin(), d.leftOut(cmd.ErrOrStderr()), nil)
		if err != nil {
			return nil, nil, err
		}
		to.desired = state.Plan()
	} else {
		to.desired = running.desired
	}
	if running != nil {
		to.families = running.families
	} else {
		to.families = hostFamilies(slog.New(slog.DiscardHandler))
	}
	to.name += " (mode " + to.cfg.Mode + ")"
	if d.against == "running" {
		running.name += " (mode " + running.cfg.Mode + ")"
		return running, to, nil
	}
	return &side{name: "kernel", cfg: to.cfg}, to, nil
}

// mode returns the mode that is asked for; "" for none.
func (d *differ) mode(cmd *cobra.Command) string {
	for _, name := range []string{"mode", "proxy-mode"} {
		if d.given(name) {
			return cmd.Flags().Lookup(name).Value.String()
		}
	}
	return ""
}

// running asks the nodeproxy of this node for what it wants.
func (d *differ) running(cmd *cobra.Command) (*side, error) {
	told := &options{}
	desired, err := d.client(elsewhere).Desired(cmd.Context(), told)
	if err != nil {
		return nil, err
	}
	for _, r := range desired.Refused {
		fmt.Fprintf(cmd.ErrOrStderr(), "note: %s\n", r)
	}
	return &side{name: "nodeproxy", cfg: told.config(), desired: desired.Plan(), families: desired.Families}, nil
}

// options are a configuration as a daemon tells of it. Some of what rules depend on is there a second time, where earlier versions look
// for it: the daemon and the command may be of different versions while one takes the place of the other.
type options struct {
	config.Config
	config.IPVS
	Variant config.Variant
}

func optionsOf(c *config.Config) *options { return &options{*c, c.IPVS, c.IPTablesBackend} }

// config returns the configuration. The settings of the kernel are read where this process sees them, not where the daemon does.
func (o *options) config() *config.Config {
	c := o.Config
	c.IPVS, c.IPTablesBackend, c.SysctlDir = o.IPVS, o.Variant, ""
	return &c
}

// compareSides returns what differs between two states, and with an error, what had been found before.
func compareSides(ctx context.Context, from, to *side) ([]drift.Hunk, error) {
	var out []drift.Hunk
	for _, f := range to.families {
		list, err := diffRules(ctx, from, to, f)
		if err != nil {
			return out, err
		}
		for _, m := range modes {
			if m.diff == nil {
				continue
			}
			some, err := m.diff(m.of(from), m.of(to), f)
			if err != nil {
				return out, err
			}
			list = append(list, some...)
		}
		out = append(out, list...)
	}
	if !from.kernel() {
		return out, nil
	}
	found, err := leftovers.Find() // No mode has it, and each removes it.
	for _, l := range found {
		out = append(out, drift.Hunk{Kind: drift.Table, File: "left by a kube-proxy", Object: names.KubeProxy, Have: []string{l.String()}})
	}
	return out, err
}

// of returns a side as a mode sees it: without anything, if another mode is in force there.
func (m *mode) of(s *side) *side {
	if s.desired == nil || s.cfg.Mode == m.name {
		return s
	}
	return &side{}
}

// kernel reports whether the side is the kernel, and nothing whether it has nothing.
func (s *side) kernel() bool  { return s.desired == nil && s.cfg != nil }
func (s *side) nothing() bool { return s.desired == nil && s.cfg == nil }

// diffRules compares the rules of iptables.
func diffRules(ctx context.Context, from, to *side, f plan.Family) ([]drift.Hunk, error) {
	var out []drift.Hunk
	compare := func(actual map[names.Table]xtables.Content, randomFully bool) {
		desired := xtables.Nothing
		if m := modeNamed(to.cfg.Mode); m.rules != nil {
			desired = m.rules(to.cfg, to.desired, f, randomFully, actual)
		}
		list := xtables.Hunks(f, desired, actual)
		common.Label(list, desired.Content(), actual)
		out = append(out, list...)
	}
	if from.desired != nil {
		actual := map[names.Table]xtables.Content{}
		if m := modeNamed(from.cfg.Mode); m.rules != nil {
			actual = m.rules(from.cfg, from.desired, f, true, nil).Content()
		}
		compare(actual, true)
		return out, nil
	}
	used := variants(to.cfg.IPTablesBackend)
	ruled := modeNamed(to.cfg.Mode).rules != nil
	if ruled && len(used) > 1 {
		used = []xtables.Variant{xtables.Detect()}
	}
	for _, v := range used {
		p, err := xtables.Find(v, f)
		if err != nil {
			if ruled {
				return nil, err
			}
			continue // Nor can nodeproxy remove anything without these programs.
		}
		actual, err := p.Present(ctx)
		if err != nil {
			return nil, err
		}
		compare(actual, p.RandomFully)
	}
	return out, nil
}

// diffStat counts differences.
type diffStat struct{ rows []diffStatRow }

type diffStatRow struct {
	file                   string
	kind                   drift.Kind
	things, added, removed int
}

func (s *diffStat) add(h drift.Hunk) {
	i := slices.IndexFunc(s.rows, func(r diffStatRow) bool { return r.file == h.File && r.kind == h.Kind })
	if i < 0 {
		i = len(s.rows)
		s.rows = append(s.rows, diffStatRow{file: h.File, kind: h.Kind})
	}
	added, removed := h.Lines()
	s.rows[i].things++
	s.rows[i].added += added
	s.rows[i].removed += removed
}

func (s *diffStat) print(w io.Writer) error {
	if len(s.rows) == 0 {
		return nil
	}
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(t, "WHERE\tKIND\tDIFFER\tLINES ADDED\tREMOVED")
	for _, r := range s.rows {
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\n", r.file, strings.ReplaceAll(string(r.kind), "_", " "), r.things, r.added, r.removed)
	}
	return t.Flush()
}
