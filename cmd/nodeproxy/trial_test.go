package main

import (
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/config"
	"nodeproxy/metrics"
)

// TestNothingIsReadForAModeThatCannotWork: each node may try such a configuration again and again, and the API server is not to be
// asked for all objects each time.
func TestNothingIsReadForAModeThatCannotWork(t *testing.T) {
	var asked atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer server.Close()
	cfg := &config.Config{Mode: "ipvs", API: config.APIServer{Master: server.URL}}
	cfg.IPVS.Scheduler = "none-such"
	r := &reloads{front: newFront(), newDaemon: forThisMachine}
	try := r.try(t.Context(), cfg)
	defer r.abandon(try)
	if err := <-try.done; err == nil || !strings.Contains(err.Error(), "mode ipvs can't work here") {
		t.Fatalf("a scheduler that no kernel has: %v", err)
	}
	try.daemon.stop()
	if n := asked.Load(); n > 0 {
		t.Errorf("the API server got %d requests", n)
	}
}

// TestWrongFileAtStart: a configuration file that is wrong while a daemon starts does not take from it the addresses that it has
// prepared.
func TestWrongFileAtStart(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := listener.Addr().(*net.TCPAddr).AddrPort()
	listener.Close()
	r := &reloads{front: newFront(), updates: make(chan update)}
	require.NoError(t, r.front.prepare(&config.Config{Servers: config.Servers{Healthz: addr, HardFail: true}}))
	defer r.front.discard()
	told := make(chan string, 1)
	d := &daemon{cfg: &config.Config{}, metrics: metrics.New(metrics.Config{}), log: slog.New(slog.DiscardHandler)}
	d.event = func(_, _, text string) { told <- text }
	ended := make(chan error)
	var running sync.WaitGroup
	running.Go(func() { _, _ = r.await(t.Context(), d, ended) })
	r.updates <- update{err: errors.New("no")}
	<-told
	if conn, err := net.Dial("tcp", addr.String()); err != nil {
		t.Errorf("the address is closed: %v", err)
	} else {
		conn.Close()
	}
	close(ended)
	running.Wait()
}

// TestHardFail: an address that another program has is an error only with --bind-address-hard-fail.
func TestHardFail(t *testing.T) {
	other, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer other.Close()
	f := newFront()
	defer f.discard()
	cfg := &config.Config{Servers: config.Servers{
		Healthz: netip.MustParseAddrPort("127.0.0.1:0"), Metrics: other.Addr().(*net.TCPAddr).AddrPort(),
	}}
	assert.NoError(t, f.prepare(cfg), "without the flag")
	cfg.Servers.HardFail = true
	if err := f.prepare(cfg); err == nil || !strings.HasPrefix(err.Error(), "--bind-address-hard-fail: metrics server at "+cfg.Servers.Metrics.String()+": ") {
		t.Errorf("with the flag: %v", err)
	}
}
