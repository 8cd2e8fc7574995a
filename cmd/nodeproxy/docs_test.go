package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/stretchr/testify/require"
)

// documented is the root with the commands that cobra adds when it runs.
func documented() *cobra.Command {
	cmd := root()
	cmd.InitDefaultHelpCmd()
	cmd.InitDefaultCompletionCmd()
	return cmd
}

// eachCommand calls do for a command that help shows and for those below it.
func eachCommand(cmd *cobra.Command, do func(*cobra.Command)) {
	do(cmd)
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			eachCommand(sub, do)
		}
	}
}

// TestDocs: docs/cli.md is what the commands say of themselves. UPDATE=1, as "make docs" sets it, writes it anew.
func TestDocs(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	text.WriteString("# The command line\n\nThis is what `nodeproxy help` says of each command; `make docs` writes it. `make man` makes man pages of the same.\n")
	eachCommand(documented(), func(cmd *cobra.Command) {
		var help bytes.Buffer
		cmd.SetOut(&help)
		require.NoError(t, cmd.Help())
		fmt.Fprintf(&text, "\n## %s\n\n```text\n", cmd.CommandPath())
		for line := range strings.Lines(help.String()) {
			text.WriteString(strings.TrimRight(line, " \n") + "\n")
		}
		text.WriteString("```\n")
	})
	documents(t, "../../docs/cli.md", text.String())
}

// documents fails the test unless a file of the documentation has this text. With UPDATE=1, as "make docs" sets it, it writes it.
func documents(t *testing.T, file, text string) {
	t.Helper()
	if os.Getenv("UPDATE") != "" {
		writeFile(t, file, text)
	}
	if readFile(t, file) != text {
		t.Errorf("%s is not what the program says; UPDATE=1 go test -run %s ./cmd/nodeproxy writes it", file, t.Name())
	}
}

// between returns a file with another text between two lines.
func between(t *testing.T, file, from, to, text string) string {
	t.Helper()
	head, rest, found := strings.Cut(readFile(t, file), from)
	_, tail, ended := strings.Cut(rest, to)
	if !found || !ended {
		t.Fatalf("%s lacks the lines %q and %q", file, from, to)
	}
	return head + from + text + to + tail
}

// flagTables are tables of the flags of run, in the groups of its help.
func flagTables() string {
	cmd := root()
	var b strings.Builder
	for _, g := range flagGroups {
		fmt.Fprintf(&b, "### %s\n\n| flag | default | meaning |\n|---|---|---|\n", g.title)
		for _, name := range strings.Fields(g.flags) {
			f := cmd.Flags().Lookup(name)
			value := f.DefValue
			if value != "" {
				value = "`" + value + "`"
			}
			names := "`--" + f.Name + "`"
			if f.Shorthand != "" && f.Shorthand != f.Name {
				names += ", `-" + f.Shorthand + "`"
			} else if f.Shorthand != "" {
				names = "`-" + f.Shorthand + "`"
			}
			fmt.Fprintf(&b, "| %s | %s | %s |\n", names, value, strings.ReplaceAll(f.Usage, "|", "\\|"))
		}
		b.WriteString("\n")
	}
	return b.String()
}

// TestConfigurationFlags: docs/configuration.md has the flags of run. UPDATE=1, as "make docs" sets it, writes them anew.
func TestConfigurationFlags(t *testing.T) {
	t.Parallel()
	const file, from, to = "../../docs/configuration.md", "<!-- flags: make docs writes this -->\n", "<!-- end of flags -->"
	documents(t, file, between(t, file, from, to, flagTables()))
}

// TestExamples: the help of each command that does anything has examples, and examples are of commands that there are.
func TestExamples(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	eachCommand(root(), func(cmd *cobra.Command) {
		seen[cmd.CommandPath()] = true
		if cmd.Runnable() && cmd.HasParent() && cmd.Name() != "version" && cmd.Example == "" {
			t.Errorf("%s has no examples in exampleTexts", cmd.CommandPath())
		}
	})
	for path, text := range exampleTexts {
		if !seen[path] || !strings.Contains(text, path) {
			t.Errorf("there are examples of %q, which is no command, or is not in them", path)
		}
	}
}

// TestMan: each command has a man page. They are written to the directory that MAN names, as "make man" does.
func TestMan(t *testing.T) {
	t.Parallel()
	dir := os.Getenv("MAN")
	if dir == "" {
		dir = t.TempDir()
	}
	cmd := documented()
	require.NoError(t, doc.GenManTree(cmd, &doc.GenManHeader{Section: "8", Source: "nodeproxy", Manual: "nodeproxy"}, dir))
	eachCommand(cmd, func(cmd *cobra.Command) {
		name := strings.ReplaceAll(cmd.CommandPath(), " ", "-")
		if page := readFile(t, filepath.Join(dir, name+".8")); !strings.Contains(page, ".SH NAME\n"+name+" - "+cmd.Short) {
			t.Errorf("%s does not say what the command does", name)
		}
	})
}
