package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"nodeproxy/config"
)

// TestNothingIsReadForAModeThatCannotWork: each node may try such a configuration again and again, and the API server is not to be
// asked for all objects each time.
func TestNothingIsReadForAModeThatCannotWork(t *testing.T) {
	var asked atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer server.Close()
	cfg := &config.Config{Mode: "ipvs", API: config.APIServer{Master: server.URL}}
	cfg.IPVS.Scheduler = "none-such"
	r := &reloads{front: newFront()}
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
