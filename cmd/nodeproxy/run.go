package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"

	"nodeproxy/config"
	"nodeproxy/source"
)

func runCommand() *cobra.Command {
	flags := &config.Flags{}
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Keep this node's rules equal to what the Services ask for",
		Long: "run reads Services and their endpoints from an API server, or from a directory of manifests, and keeps the rules of this node equal\n" +
			"to what they ask for, until SIGTERM or SIGINT ends it. The rules stay when it ends. If a kube-proxy or another nodeproxy runs on\n" +
			"the node, it writes nothing until that one has ended.\n\n" +
			"Exit codes: 0 after SIGTERM or SIGINT; 1 if the mode can't work on this node, or if a server can't listen with\n" +
			"--bind-address-hard-fail; 2 if the command line or the configuration is wrong, in which case nothing has been changed.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if flags.WriteConfigTo() != "" {
				return writeConfig(flags)
			}
			cfg, err := flags.Config()
			if err != nil {
				return &usageError{err}
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGTERM, os.Interrupt)
			defer stop()
			switch {
			case cfg.Cleanup:
				return cleanup(ctx, cfg, cleanupOf{}, cmd.OutOrStdout(), cmd.ErrOrStderr())
			case cfg.InitOnly:
				return initOnly(ctx, cfg, newLog(cfg))
			}
			return runWatched(ctx, flags, cfg)
		},
	}
	flags.Add(cmd.Flags())
	return cmd
}

// runWatched runs until ctx ends, and with each new configuration that the file comes to hold and that can be put in force. Rules
// stay in force in between.
func runWatched(ctx context.Context, flags *config.Flags, cfg *config.Config) error {
	ctx, cancel := context.WithCancel(ctx)
	r := &reloads{claim: &claim{process: ctx}, front: newFront(), updates: make(chan update), newDaemon: forThisMachine}
	defer r.claim.close()
	defer r.front.close()
	defer cancel()
	slog.SetDefault(newLog(cfg)) // What outlives a configuration logs by it.
	requests.Listen()
	d, err := r.newDaemon(ctx, cfg)
	if err != nil {
		return err
	}
	limitMemory()
	d.begin()
	go flags.Watch(ctx, func(c *config.Config, err error) {
		select {
		case r.updates <- update{c, err}:
		case <-ctx.Done():
		}
	})
	return r.run(ctx, d)
}

// setOOMScore says how ready the kernel is to kill this process when memory runs out. Only a process with CAP_SYS_RESOURCE
// may lower its own.
func setOOMScore(score int) error {
	const file = "/proc/self/oom_score_adj"
	if err := os.WriteFile(file, []byte(strconv.Itoa(score)), 0o644); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("oomScoreAdj: setting it to %d: %w", score, err)
	}
	return nil
}

// reporter logs findings: problems as warnings, notes at level info.
func reporter(log *slog.Logger) source.Report {
	return func(f source.Finding) {
		level := slog.LevelInfo
		if f.Severity == source.Problem {
			level = slog.LevelWarn
		}
		var attrs []slog.Attr
		for _, a := range [][2]string{{"at", f.Where}, {"object", f.Object}, {"field", f.Field}} {
			if a[1] != "" {
				attrs = append(attrs, slog.String(a[0], a[1]))
			}
		}
		log.LogAttrs(context.Background(), level, f.String(), attrs...)
	}
}
