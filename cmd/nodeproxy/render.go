package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"nodeproxy/config"
	"nodeproxy/iptables"
	"nodeproxy/ipvs"
	"nodeproxy/proxier"
	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/source"
	"nodeproxy/proxier/source/manifest"
)

func renderCommand() *cobra.Command {
	flags := &config.Flags{}
	family := ""
	cmd := &cobra.Command{
		Use:   "render",
		Short: "Print the rules that run would make of the manifests",
		Long: "render prints, as input for iptables-restore, the rules that run would make of the manifests. It needs no root and\n" +
			"changes nothing. What there is to say about the objects goes to standard error. In mode ipvs, sections behind comment\n" +
			"lines are input for ipset, ipvsadm, ip and iptables-restore.\n\n" +
			"With both families in one text, every rule begins with -4 or -6, so that iptables-restore and ip6tables-restore\n" +
			"each take their own; --family=ipv4 or ipv6 prints one family without that.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := flags.Config()
			if err != nil {
				return &usageError{err}
			}
			if cfg.Manifests == "" {
				return &usageError{errors.New("--manifests: required: render works on manifests")}
			}
			if !slices.Contains([]string{"all", "ipv4", "ipv6"}, family) {
				return &usageError{fmt.Errorf("--family: %q is none of ipv4, ipv6, all", family)}
			}
			report := func(f source.Finding) { fmt.Fprintf(cmd.ErrOrStderr(), "%s: %s\n", f.Severity, f) }
			text, err := render(cfg, family, report)
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), text)
			return err
		},
	}
	flags.Add(cmd.Flags())
	cmd.Flags().StringVar(&family, "family", "all", "families to print: ipv4, ipv6 or all")
	return cmd
}

func render(cfg *config.Config, family string, report source.Report) (string, error) {
	batch, err := manifest.Load(manifestConfig(cfg, report, newLog(cfg)))
	if err != nil {
		return "", err
	}
	state := proxier.NewState(cfg.NodeName, cfg.Settings, plan.Families[:], report)
	state.Apply(batch)
	desired, _ := state.Update()
	families := map[string][]plan.Family{"ipv4": {plan.IPv4}, "ipv6": {plan.IPv6}}[family]
	if cfg.Mode == "ipvs" {
		return renderIPVS(cfg, desired, families), nil
	}
	options := iptables.Options{
		MasqueradeBit: cfg.MasqueradeBit, RandomFully: true, CompactAbove: iptables.DefaultCompactAbove,
		KeepCounters: cfg.ServiceMetrics > 0,
	}
	if len(families) == 1 {
		return iptables.Render(desired, families[0], options), nil
	}
	return iptables.RenderAll(desired, options), nil
}

// renderIPVS prints what mode ipvs makes of a plan, of both families unless one is given.
func renderIPVS(cfg *config.Config, desired *plan.Plan, families []plan.Family) string {
	options := ipvs.Options{
		MasqueradeBit: cfg.MasqueradeBit, RandomFully: true, Scheduler: cfg.IPVS.Scheduler, VIPs: cfg.IPVS.VIPs,
	}
	if len(families) == 1 {
		return ipvs.Render(desired, families[0], options)
	}
	var out strings.Builder
	for _, f := range plan.Families {
		fmt.Fprintf(&out, "# %s\n%s", f, ipvs.Render(desired, f, options))
	}
	return out.String()
}
