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

// Process is a program in a namespace, such as one of the control plane. It dies with this process.
type Process struct {
	Name, Path, LogFile string
	Args, Env           []string // Env comes after this process's environment.
	Netns               *harness.Netns
	PID                 int           // 0 while it does not run
	Exited              chan struct{} // closed when it has ended
}

// Start starts the process, also again after Kill. Its output is appended to its log file.
func (p *Process) Start() error {
	log, err := os.OpenFile(p.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.Path, p.Args...)
	cmd.Stdout, cmd.Stderr, cmd.Env = log, log, append(os.Environ(), p.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.Netns.Start(cmd); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	exited := make(chan struct{})
	p.PID, p.Exited = cmd.Process.Pid, exited
	go func() {
		_ = cmd.Wait() // how it ended does not matter: whether it works shows in what it does
		close(exited)
	}()
	return nil
}

// Kill ends the process with SIGKILL, as a crash would, and waits until it and those that it has started are gone: one that is in the kernel,
// which may take minutes there, ends when it comes out.
func (p *Process) Kill() {
	if p.PID == 0 {
		return
	}
	for begun := time.Now(); syscall.Kill(-p.PID, syscall.SIGKILL) == nil && time.Since(begun) < harness.Limit; {
		time.Sleep(10 * time.Millisecond)
	}
	<-p.Exited
	p.PID = 0
}

// Stop ends the process, frozen or not, by force if it does not go in ten seconds.
func (p *Process) Stop() {
	if p.PID == 0 {
		return
	}
	_ = p.Thaw()
	_ = syscall.Kill(p.PID, syscall.SIGTERM)
	select {
	case <-p.Exited:
	case <-time.After(10 * time.Second):
	}
	p.Kill()
}

// Freeze stops the process without closing its connections; Thaw lets it go on.
func (p *Process) Freeze() error { return syscall.Kill(p.PID, syscall.SIGSTOP) }

// Thaw is the end of Freeze.
func (p *Process) Thaw() error { return syscall.Kill(p.PID, syscall.SIGCONT) }

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
		case <-p.Exited:
			return fmt.Errorf("%s %w: %s", p.Name, errEnded, p.Tail())
		case <-time.After(250 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return errors.Join(fmt.Errorf("%s is not ready after %s: %w", p.Name, timeout, err), errors.New(p.Tail()))
		}
	}
}

// Tail is the end of the log.
func (p *Process) Tail() string {
	b, err := os.ReadFile(p.LogFile)
	if err != nil {
		return err.Error()
	}
	const most = 4000
	if len(b) > most {
		b = b[len(b)-most:]
	}
	return fmt.Sprintf("--- log of %s\n%s", p.Name, b)
}
