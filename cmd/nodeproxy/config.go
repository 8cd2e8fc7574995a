package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"nodeproxy/config"
)

func configCommand() *cobra.Command {
	flags := &config.Flags{}
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print the effective configuration",
		Long: "config prints the configuration that results from the defaults, the file of --config and the other flags, as a file that both\n" +
			"nodeproxy and kube-proxy can read. Comments say where a flag overrides the file, and what only flags can set. Warnings, such as\n" +
			"those about settings without effect, go to standard error. It changes nothing.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if flags.WriteConfigTo() != "" {
				return writeConfig(flags)
			}
			text, cfg, err := effectiveConfig(flags)
			if err != nil {
				return err
			}
			for _, f := range cfg.Findings {
				printFinding(cmd.ErrOrStderr(), f)
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
	flags.Add(cmd.Flags())
	return cmd
}

// writeConfig writes the effective configuration to the file that --write-config-to names.
func writeConfig(flags *config.Flags) error {
	text, _, err := effectiveConfig(flags)
	if err != nil {
		return err
	}
	if err := os.WriteFile(flags.WriteConfigTo(), text, 0o644); err != nil {
		return fmt.Errorf("--write-config-to: %w", err)
	}
	return nil
}

// effectiveConfig is the effective configuration as text and as what it means. It need not say where objects come from.
func effectiveConfig(flags *config.Flags) ([]byte, *config.Config, error) {
	effective, err := flags.Effective()
	if err != nil {
		return nil, nil, &usageError{err}
	}
	cfg, err := effective.Config()
	if err != nil {
		return nil, nil, &usageError{err}
	}
	text, err := effective.YAML()
	return text, cfg, err
}
