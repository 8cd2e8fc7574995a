package main

import (
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/source/apiserver/apiservertest"
)

// TestStopWithoutAPIServer: SIGTERM ends the process, also while the API server refuses connections, or gives no answer, be
// it from the start or after it had delivered all objects.
func TestStopWithoutAPIServer(t *testing.T) {
	t.Parallel()
	for _, answered := range []bool{false, true} {
		for _, refuses := range []bool{false, true} {
			name := map[bool]string{false: "never answered", true: "answered before"}[answered] + " and now " +
				map[bool]string{false: "hangs", true: "refuses"}[refuses]
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				nstest.Enter(t)
				state, took := stopped(t, answered, refuses)
				if !state.Success() {
					t.Fatalf("%v, want success", state)
				}
				t.Logf("it took %v", took) // TestRunEndsAtOnce holds that it waits for nothing.
			})
		}
	}
}

// stopped runs a process, ends it by SIGTERM, and returns how long that took.
func stopped(t *testing.T, answered, refuses bool) (state *os.ProcessState, took time.Duration) {
	t.Helper()
	const address = "127.0.0.1:6443"
	var p *process
	if answered {
		cluster := apiservertest.At(t, address)
		p = startProcess(t, nil, "--master=http://"+address, "--kube-api-content-type=application/json")
		eventually(t, "all objects are read", func() bool {
			return cluster.Lists("services") > 0 && cluster.Lists("nodes") > 0 && cluster.Lists("endpointslices") > 0
		})
		time.Sleep(time.Second) // The watches begin.
		cluster.End()
	}
	if !refuses {
		listener, err := net.Listen("tcp", address) // The kernel accepts; nobody answers.
		require.NoError(t, err)
		defer listener.Close()
	}
	if !answered {
		p = startProcess(t, nil, "--master=http://"+address)
	}
	time.Sleep(5 * time.Second) // By then, it waits for seconds between two attempts.
	begun := time.Now()
	require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	select {
	case <-p.ended:
	case <-time.After(time.Minute):
		t.Fatal("it goes on for a minute")
	}
	return p.ProcessState, time.Since(begun)
}
