// Command nodeproxy is a node-local proxy for Kubernetes Services.
package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"
	cliflag "k8s.io/component-base/cli/flag"

	"nodeproxy/config"
	"nodeproxy/inspect"
)

func main() {
	err := root().Execute()
	var usage *usageError
	switch {
	case errors.As(err, &usage):
		complain(err)
		os.Exit(2)
	case errors.Is(err, errProblem):
		os.Exit(1)
	case err != nil:
		complain(err)
		os.Exit(1)
	}
}

// complain prints an error, which may have several lines. It may quote an argument, the name of an object or a file, and what is not
// printable in these does not get to the terminal.
func complain(err error) {
	lines := strings.Split(err.Error(), "\n")
	for i := range lines {
		lines[i] = inspect.Printable(lines[i])
	}
	fmt.Fprintf(os.Stderr, "nodeproxy: %s\n", strings.Join(lines, "\n"))
}

// usageError is a mistake on the command line, before anything is touched, or any error of diff: exit code 2.
type usageError struct{ error }

func (e *usageError) Unwrap() error { return e.error }

func root() *cobra.Command {
	run := runCommand()
	cmd := &cobra.Command{
		Use:   "nodeproxy",
		Short: "Proxy for Kubernetes Services on one node",
		Long: "nodeproxy forwards traffic for Kubernetes Services to their endpoints, by rules that it keeps in the kernel.\n" +
			"Without a subcommand it does what \"nodeproxy run\" does.",
		Args:          noArgs,
		Version:       version,
		RunE:          run.RunE,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.Flags().AddFlagSet(run.Flags())
	cmd.SetGlobalNormalizationFunc(cliflag.WordSepNormalizeFunc)
	cmd.SetUsageFunc(usage)
	cmd.SetFlagErrorFunc(flagMistake)
	cmd.AddCommand(run, refuseOthers(renderCommand()), refuseOthers(configCommand()), refuseOthers(cleanupCommand()), getCommand(), explainCommand(),
		historyCommand(), statusCommand(), supportCommand(), topCommand(), traceCommand(), diffCommand(), installCommand(), pauseCommand(),
		versionCommand())
	requireCommand(cmd)
	cmd.InitDefaultCompletionCmd()
	addExamples(cmd)
	completeAll(cmd)
	requireShell(cmd)
	return cmd
}

// noArgs refuses arguments that are no flags, such as a misspelt subcommand.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return unknownArgument(cmd, args[0])
}

// unknownArgument is the mistake of an argument that is no command below cmd, with the commands that may have been meant.
func unknownArgument(cmd *cobra.Command, arg string) error {
	cmd.SuggestionsMinimumDistance = 2
	if near := cmd.SuggestionsFor(arg); len(near) > 0 {
		return &usageError{fmt.Errorf("unknown argument %q; did you mean %s?", arg, strings.Join(near, " or "))}
	}
	return &usageError{fmt.Errorf("unknown argument %q; %s --help lists what there is", arg, cmd.CommandPath())}
}

// version is set when the program is built, and image, for a release: the one that the command install names by default.
var version, image = "dev", ""

// program is how this program is called in answers.
func program() string { return "nodeproxy/" + version }

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  noArgs,
		Run:   func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), version) },
	}
}

func newLog(c *config.Config) *slog.Logger {
	level := map[string]slog.Level{
		"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError,
	}[c.LogLevel]
	options, out := &slog.HandlerOptions{Level: level}, io.MultiWriter(&recentLog, os.Stderr)
	if c.LogFormat == "json" {
		options.ReplaceAttr = func(_ []string, a slog.Attr) slog.Attr {
			if a.Value.Kind() == slog.KindDuration { // By default it is a number of nanoseconds, which nobody can tell.
				a.Value = slog.StringValue(a.Value.Duration().String())
			}
			return a
		}
		return slog.New(slog.NewJSONHandler(out, options))
	}
	return slog.New(slog.NewTextHandler(out, options))
}
