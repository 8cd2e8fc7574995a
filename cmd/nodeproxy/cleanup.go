package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"nodeproxy/config"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/kernel/xtables"
	"nodeproxy/node/exclusive"
	"nodeproxy/node/leftovers"
)

func cleanupCommand() *cobra.Command {
	flags := &config.Flags{}
	var what cleanupOf
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove everything that nodeproxy and kube-proxy have in the kernel",
		Long: "cleanup removes what nodeproxy and kube-proxy keep in the kernel of this node, in every mode: iptables rules of both\n" +
			"variants, virtual servers (but for --ipvs-exclude-cidrs), ipsets, routing rules, the device kube-ipvs0, kube-proxy's nftables tables,\n" +
			"and its accounting objects. What belongs to others stays, and so does what is shared with the kubelet. It prints a\n" +
			"line for each thing that it removes. If something could not be removed, it names it and fails. A running proxy would write\n" +
			"everything again: cleanup warns of one, and goes on.\n\n" +
			"On a node that kube-proxy serves again after nodeproxy in mode nftables, use --nftables-only.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cmd.Flags().Set("cleanup", "true"); err != nil {
				return err
			}
			_, cfg, err := effectiveConfig(flags)
			if err != nil {
				return err
			}
			return cleanup(cmd.Context(), cfg, what, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags.Add(cmd.Flags())
	cmd.Flags().BoolVar(&what.dry, "dry-run", false, "only print what would be removed")
	cmd.Flags().BoolVar(&what.onlyNFTables, "nftables-only", false,
		"remove only nodeproxy's tables of mode nftables, and nothing that kube-proxy may be using")
	// Here the default is another one: what is left may be of either variant.
	backend := cmd.Flags().Lookup("iptables-backend")
	backend.Usage = "implementation of iptables whose rules are removed: nft, legacy, or both, which auto means here too"
	backend.DefValue = string(config.BothVariants)
	return cmd
}

// cleanupOf says what cleanup does.
type cleanupOf struct {
	dry bool // only list it
	// onlyNFTables removes nothing but the tables of mode nftables. A kube-proxy doesn't know them, so only cleanup can remove them where
	// one serves the node again; everything else may be that one's by now.
	onlyNFTables bool
}

// cleanup removes what is kube-proxy's or this program's, or only lists it on out, one line for each thing. Anything
// else that the user should know goes to warnings.
func cleanup(ctx context.Context, cfg *config.Config, what cleanupOf, out, warnings io.Writer) error {
	if err := mayAdminister(); err != nil {
		return err
	}
	guard := exclusive.Guard{Ports: proxyPorts(cfg), Log: slog.New(slog.DiscardHandler)}
	if other := guard.Other(); other != nil && (!what.onlyNFTables || other.Name == "nodeproxy") {
		when := "now"
		if what.dry {
			when = "without --dry-run"
		}
		fmt.Fprintf(warnings, "warning: %s runs, and will write anew what is removed %s\n", other, when)
	}
	defer guard.Close()
	failed := false
	err := eachLeft(ctx, cfg, what, func(line string) { fmt.Fprintln(out, line) })
	if what.dry {
		return err
	}
	// Whatever the kernel said, what counts is what it has now.
	what.dry = true
	again := eachLeft(ctx, cfg, what, func(line string) {
		failed = true
		fmt.Fprintf(warnings, "still there: %s\n", line)
	})
	if err == nil {
		err = again
	}
	if failed {
		err = errors.Join(errors.New("not everything is removed"), err)
	}
	return err
}

// mayAdminister returns an error unless the kernel lets this process see and change rules.
func mayAdminister() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return fmt.Errorf("reading this process's capabilities: %w", err)
	}
	if sets[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0 {
		return errors.New("cleanup needs the capability CAP_NET_ADMIN to see and to remove rules, and this process lacks it: run it as root; " +
			"nothing has been removed")
	}
	return nil
}

// eachLeft removes everything, or only lists it. Rules go first: they ask the sets, and count with the accounting objects.
func eachLeft(ctx context.Context, cfg *config.Config, what cleanupOf, each func(string)) error {
	with := removal{cfg: cfg, log: slog.New(slog.DiscardHandler), list: each, dry: what.dry}
	if what.onlyNFTables {
		return nftablesMode.remove(ctx, with)
	}
	var errs []error
	lines, err := xtables.Cleanup(ctx, what.dry, variants(cfg.IPTablesBackend)...)
	for _, line := range lines {
		each(line)
	}
	errs = append(errs, err)
	for _, m := range modes {
		if m.remove != nil {
			errs = append(errs, m.remove(ctx, with))
		}
	}
	found, err := leftovers.Find()
	errs = append(errs, err)
	for _, l := range found {
		each(l.String())
	}
	if !what.dry {
		_, err = leftovers.Remove(found)
		errs = append(errs, err)
	}
	return errors.Join(append(errs, removeTraces(with))...)
}

// removeTraces removes the tables of a "trace --live" that was killed, which a kernel before 5.12 leaves. That of one that runs stays.
func removeTraces(r removal) error {
	left, err := nft.FamiliesWith(names.Trace)
	for _, f := range left {
		r.list("nftables table " + nft.FamilyName(f) + " " + names.Trace)
	}
	if r.dry || len(left) == 0 {
		return err
	}
	return errors.Join(err, nft.RemoveTables(names.Trace))
}

// variants are the variants of iptables that may hold rules with this setting.
func variants(setting config.Variant) []xtables.Variant {
	if v := variant(setting); v != "" {
		return []xtables.Variant{v}
	}
	return []xtables.Variant{xtables.NFT, xtables.Legacy}
}

// variant returns the variant of iptables that the setting names, and "" if it leaves the choice open.
func variant(setting config.Variant) xtables.Variant {
	return map[config.Variant]xtables.Variant{config.NFTVariant: xtables.NFT, config.LegacyVariant: xtables.Legacy}[setting]
}
