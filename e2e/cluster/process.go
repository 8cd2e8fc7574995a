package cluster

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"nodeproxy/e2e/harness"
)

// Process is a program of the control plane. It dies with this process.
type Process struct {
	name, path, logFile string
	args                []string
	netns               *harness.Netns

	cmd    *exec.Cmd
	exited chan struct{}
}

// Start starts the process, also again after Kill. Its output is appended to its log file.
func (p *Process) Start() error {
	log, err := os.OpenFile(p.logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.path, p.args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := p.netns.Start(cmd); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	exited := make(chan struct{})
	p.cmd, p.exited = cmd, exited
	go func() {
		_ = cmd.Wait() // how it ended does not matter: whether it works shows in what it does
		close(exited)
	}()
	return nil
}

// Kill ends the process with SIGKILL, as a crash would, and waits until it is gone.
func (p *Process) Kill() {
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Kill() // it may be gone already
	<-p.exited
}

// Freeze stops the process without closing its connections; Thaw lets it go on.
func (p *Process) Freeze() error { return p.cmd.Process.Signal(syscall.SIGSTOP) }

// Thaw is the end of Freeze.
func (p *Process) Thaw() error { return p.cmd.Process.Signal(syscall.SIGCONT) }

var errEnded = errors.New("ended by itself")

// await repeats a check until it succeeds, the process ends, or the time is up.
func (p *Process) await(timeout time.Duration, check func() error) error {
	deadline := time.Now().Add(timeout)
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-p.exited:
			return fmt.Errorf("%s %w: %s", p.name, errEnded, p.tail())
		case <-time.After(250 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return errors.Join(fmt.Errorf("%s is not ready after %s: %w", p.name, timeout, err), errors.New(p.tail()))
		}
	}
}

// tail is the end of the log.
func (p *Process) tail() string {
	b, err := os.ReadFile(p.logFile)
	if err != nil {
		return err.Error()
	}
	const most = 4000
	if len(b) > most {
		b = b[len(b)-most:]
	}
	return fmt.Sprintf("--- log of %s\n%s", p.name, b)
}
