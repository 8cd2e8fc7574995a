package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os/exec"

	"github.com/spf13/cobra"

	"nodeproxy/config"
	"nodeproxy/iptables"
	"nodeproxy/ipvs"
	"nodeproxy/proxier/conntrack"
)

func cleanupCommand() *cobra.Command {
	flags := &config.Flags{}
	dry := false
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove everything that nodeproxy and kube-proxy have in the kernel",
		Long: "cleanup removes what nodeproxy and kube-proxy keep in the kernel of this node, in every mode: iptables rules of both\n" +
			"variants, virtual servers (but for --ipvs-exclude-cidrs), ipsets, the device kube-ipvs0, and kube-proxy's nftables\n" +
			"tables. What is anybody else's stays, and so does what is shared with the kubelet. It prints a line for each thing.\n" +
			"No proxy may be running, or it makes everything anew.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			effective, err := flags.Effective()
			if err != nil {
				return &usageError{err}
			}
			cfg, err := effective.Config()
			if err != nil {
				return &usageError{err}
			}
			return cleanup(cmd.Context(), cfg, dry, cmd.OutOrStdout())
		},
	}
	flags.Add(cmd.Flags())
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only print what would be removed")
	return cmd
}

// cleanup removes what is ours, or with dry lists it. Rules go first: they ask the sets.
func cleanup(ctx context.Context, cfg *config.Config, dry bool, out io.Writer) error {
	var errs []error
	tell := func(lines []string, err error) {
		for _, line := range lines {
			fmt.Fprintln(out, line)
		}
		errs = append(errs, err)
	}
	tell(iptables.Cleanup(ctx, dry))
	tell(kubeProxyNFTables(ctx, dry))
	c := ipvs.Cleaner{ExcludeCIDRs: cfg.IPVS.ExcludeCIDRs, MasqueradeBit: cfg.MasqueradeBit, Log: slog.New(slog.DiscardHandler)}
	left, err := ipvs.Leftovers()
	if err == nil && left {
		tell(c.List())
		if !dry {
			err = c.Run(ctx)
		}
	}
	return errors.Join(append(errs, err)...)
}

// kubeProxyNFTables removes the tables of kube-proxy's mode nftables, by the program nft. Without it, nobody has made any.
func kubeProxyNFTables(ctx context.Context, dry bool) ([]string, error) {
	nft, err := exec.LookPath("nft")
	if err != nil {
		return nil, nil
	}
	list, err := exec.CommandContext(ctx, nft, "list", "tables").Output()
	if err != nil {
		return nil, fmt.Errorf("listing nftables tables by %s: %w", nft, err)
	}
	var out []string
	for _, family := range []string{"ip", "ip6"} {
		name := "table " + family + " kube-proxy"
		if !bytes.Contains(list, []byte(name+"\n")) {
			continue
		}
		out = append(out, "nftables "+name)
		if dry {
			continue
		}
		if text, err := exec.CommandContext(ctx, nft, "delete", "table", family, "kube-proxy").CombinedOutput(); err != nil {
			return out, fmt.Errorf("removing nftables %s: %w: %s", name, err, bytes.TrimSpace(text))
		}
	}
	return out, nil
}

// initOnly does what needs more rights than the program has to have later: it loads modules and makes kernel settings.
func initOnly(cfg *config.Config, log *slog.Logger) error {
	for _, u := range conntrack.Sysctls(cfg.Conntrack).Apply(cfg.SysctlDir) {
		log.Warn("connections are tracked by what is in force", "field", u.Field, "error", u.Error())
	}
	if cfg.Mode != "ipvs" {
		return nil
	}
	return ipvs.Prepare(ipvs.Config{
		Options: ipvs.Options{Scheduler: cfg.IPVS.Scheduler}, StrictARP: cfg.IPVS.StrictARP, SysctlDir: cfg.SysctlDir, Log: log,
	})
}
