package xtables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Restore runs iptables-restore --noflush. The end of the daemon does not interrupt it once it has begun: a table changes as a whole or not at
// all, but a program that is killed between two tables leaves them at odds. Only one that hangs is ended; then what the kernel has
// is not known, as after any error.
func (t *Program) Restore(text string) error {
	t.written.Store(true)
	text, deletions := t.deletions(text)
	if err := t.restoreText(text); err != nil {
		return err
	}
	return t.delete(deletions)
}

func (t *Program) restoreText(text string) error {
	args := []string{"--noflush", "--counters"}
	if t.Variant == Legacy {
		args = append(args, "-w", strconv.Itoa(lockWait))
	}
	limit := t.RestoreTime + time.Duration(strings.Count(text, "\n"))*lineTime
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, t.RestorePath, args...)
	cmd.WaitDelay = outputTime
	cmd.Stdin = strings.NewReader(text)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := t.children.run(cmd)
	if err == nil {
		return nil
	}
	// Neither error says anything about the input, so they are no RestoreError.
	if errors.Is(err, exec.ErrWaitDelay) {
		return fmt.Errorf("%s ended, but its output did not within %v: %w", t.RestorePath, outputTime, err)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%s was ended, since it did not end by itself within %v: %s", t.RestorePath, limit, oneLine(out.String()))
	}
	return &RestoreError{Program: t.RestorePath, Message: oneLine(out.String()), Excerpt: Excerpt(text, out.String()), Err: err}
}

// RestoreError is the error of input that iptables-restore refused.
type RestoreError struct {
	Program string
	// Message is what the program said.
	Message string
	// Excerpt is the refused line with those around it, numbered; empty where the program did not name one.
	Excerpt string
	Err     error
}

func (e *RestoreError) Error() string {
	s := fmt.Sprintf("%s: %v: %s", e.Program, e.Err, e.Message)
	if e.Excerpt != "" {
		s += "\n" + e.Excerpt
	}
	return s
}

func (e *RestoreError) Unwrap() error { return e.Err }

// The ways in which the variants name the line.
var failedLine = regexp.MustCompile(`(?m)(?:Error occurred at line: |^line |: line )(\d+)`)

// Excerpt cuts the line that a message names out of the input, with three lines before and after it.
func Excerpt(input, message string) string {
	m := failedLine.FindStringSubmatch(message)
	if m == nil {
		return ""
	}
	n, err := strconv.Atoi(m[1])
	lines := strings.Split(input, "\n")
	if err != nil || n < 1 || n > len(lines) {
		return ""
	}
	var b strings.Builder
	for i := max(1, n-3); i <= min(len(lines), n+3); i++ {
		mark := "  "
		if i == n {
			mark = "> "
		}
		fmt.Fprintf(&b, "%s%d: %s\n", mark, i, lines[i-1])
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// oneLine makes a program's message fit into a log line. Hints about --help are of no use here.
func oneLine(s string) string {
	var out []string
	for _, line := range strings.Split(s, "\n") {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "Try `") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "; ")
}

// IsRefused reports whether an error is that iptables-restore, or the kernel, refuses some input, whenever it is tried.
func IsRefused(err error) bool {
	var refused *RestoreError
	return errors.As(err, &refused) && !isLocked(err)
}

// isLocked reports whether an error is that another program did not release the xtables lock in time. A retry soon makes sense.
func isLocked(err error) bool {
	const said = "xtables lock"
	var write *RestoreError
	var read *ReadError
	return errors.As(err, &write) && strings.Contains(write.Message, said) || errors.As(err, &read) && strings.Contains(read.message, said)
}
