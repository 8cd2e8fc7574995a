package xtables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Restore runs iptables-restore --noflush. The end of the daemon does not interrupt it once it has begun: a table changes as a whole or not at
// all, but a program that is killed between two tables leaves them at odds. Only one that hangs is ended; then what the kernel has
// is not known, as after any error.
func (t *Program) Restore(input Input) error {
	t.written.Store(true)
	input, deletions := t.deletions(input)
	if err := t.restore(input); err != nil {
		return err
	}
	return t.delete(deletions)
}

func (t *Program) restore(input Input) error {
	limit := t.RestoreTime + time.Duration(input.lines())*lineTime
	if r := t.ahead; r != nil {
		t.ahead = nil
		if taken, err := r.run(input, limit); taken {
			return err
		}
		// Somebody had ended it.
	}
	r, err := t.start()
	if err != nil {
		return &RestoreError{Program: t.RestorePath, Err: err}
	}
	_, err = r.run(input, limit)
	return err
}

// Prepare starts the program that the next Restore needs, so that this begins sooner. It waits for its input, and ends without one when this
// process does. Where it can't be started, Restore tries it again.
func (t *Program) Prepare() {
	if t.ahead == nil {
		t.ahead, _ = t.start()
	}
}

// Close ends what Prepare has started. That has had no input, so it has begun nothing; and it may hang.
func (t *Program) Close() {
	if t.ahead != nil {
		t.ahead.end()
		_ = t.ahead.cmd.Wait()
		t.ahead = nil
	}
}

// restoring is a run of iptables-restore, which does nothing before it has its input.
type restoring struct {
	*Program
	cmd    *exec.Cmd
	input  io.WriteCloser
	output bytes.Buffer
	ctx    context.Context
	end    context.CancelFunc
}

func (t *Program) start() (*restoring, error) {
	args := []string{"--noflush", "--counters"}
	if t.Variant == Legacy {
		args = append(args, "-w", strconv.Itoa(lockWait))
	}
	r := &restoring{Program: t}
	r.ctx, r.end = context.WithCancel(context.Background())
	r.cmd = exec.CommandContext(r.ctx, t.RestorePath, args...)
	r.cmd.WaitDelay = outputTime
	r.cmd.Stdout, r.cmd.Stderr = &r.output, &r.output
	var err error
	if r.input, err = r.cmd.StdinPipe(); err == nil {
		err = r.cmd.Start()
	}
	if err != nil {
		r.end()
		return nil, err
	}
	return r, nil
}

// run gives the program its input, and waits for its end. taken is false where it has taken nothing of that.
func (r *restoring) run(input Input, limit time.Duration) (taken bool, err error) {
	defer r.end()
	defer time.AfterFunc(limit, r.end).Stop()
	pid := uint32(r.cmd.Process.Pid)
	r.children.begin(pid)
	defer r.children.ended(pid)
	given := make(chan bool, 1)
	go func() { // It may hang before it has read all.
		n, err := input.WriteTo(r.input)
		_ = r.input.Close()
		given <- n > 0 || err == nil
	}()
	err = r.cmd.Wait()
	taken = <-given
	switch {
	case err == nil:
		return taken, nil
	// Neither error says anything about the input, so they are no RestoreError.
	case errors.Is(err, exec.ErrWaitDelay):
		return taken, fmt.Errorf("%s ended, but its output did not within %v: %w", r.RestorePath, outputTime, err)
	case r.ctx.Err() != nil:
		return taken, fmt.Errorf("%s was ended, since it did not end by itself within %v: %s", r.RestorePath, limit, oneLine(r.output.String()))
	}
	said := r.output.String()
	return taken, &RestoreError{Program: r.RestorePath, Message: oneLine(said), Excerpt: Excerpt(input.String(), said), Err: err}
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
