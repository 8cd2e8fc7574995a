package main

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"nodeproxy/config"
)

// TestFlagsOfSubcommands: a flag that means nothing to a subcommand is a mistake, and nothing is done.
func TestFlagsOfSubcommands(t *testing.T) {
	t.Parallel()
	for _, args := range []string{
		"render --cleanup", "render --init-only", "render --write-config-to=/nowhere/x", "render --take-over",
		"cleanup --write-config-to=/nowhere/x", "cleanup --init-only", "cleanup --take-over", "config --cleanup", "config --init-only",
	} {
		cmd := root()
		cmd.SetArgs(strings.Fields(args))
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		var usage *usageError
		if err := cmd.Execute(); !errors.As(err, &usage) || !strings.Contains(err.Error(), "it means nothing to nodeproxy ") {
			t.Errorf("%s: %v", args, err)
		}
	}
}

// TestJSONDurations have a unit.
func TestJSONDurations(t *testing.T) {
	stderr := os.Stderr
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	os.Stderr = w
	newLog(&config.Config{LogFormat: "json", LogLevel: "info"}).Info("x", slog.Group("g", "took", 1500*time.Millisecond))
	os.Stderr = stderr
	w.Close()
	var text bytes.Buffer
	if _, err := io.Copy(&text, r); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text.String(), `"took":"1.5s"`) {
		t.Errorf("got %s", &text)
	}
}
