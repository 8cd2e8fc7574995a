package main

import (
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"nodeproxy/config"
	"nodeproxy/metrics"
	"nodeproxy/plan"
	"nodeproxy/proxier"
)

// TestRestOfAChangeIsLate: a node on which a part of a large change is programmed and the rest fails is unhealthy in the end.
func TestRestOfAChangeIsLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := slog.New(slog.DiscardHandler)
		set := metrics.New(metrics.Config{Mode: "iptables", Families: plan.Families[:], Start: time.Now(), Log: log})
		m := newMonitor(&daemon{cfg: &config.Config{SyncPeriod: 30 * time.Second}, metrics: set, log: log}, plan.Families[:], newFront())
		p := plan.New(plan.Node{}, plan.Settings{})
		m.Queued(proxier.Input{}, true)
		m.Taken()
		m.Synced(p, plan.Everything(), proxier.Result{})
		m.Queued(proxier.Input{}, true)
		m.Taken()
		m.Synced(p, plan.Only(nil), proxier.Result{Waiting: 100})
		if !m.node.Healthy() {
			t.Error("unhealthy while a large change is being programmed")
		}
		for range 4 {
			time.Sleep(20 * time.Second)
			m.Taken()
			m.Synced(p, plan.Everything(), proxier.Result{Err: errors.New("no"), Retry: true})
		}
		if m.node.Healthy() {
			t.Error("healthy though most of a change has not been programmed for 80 s")
		}
		m.Synced(p, plan.Everything(), proxier.Result{Retry: true})
		if !m.node.Healthy() {
			t.Error("unhealthy when all is programmed")
		}
		m.Queued(proxier.Input{}, true)
		m.Taken()
		m.Synced(p, plan.Only(nil), proxier.Result{Unfinished: true})
		time.Sleep(time.Second)
		if m.node.OldestChange() == 0 {
			t.Error("no change waits, though the backend has not finished one")
		}
	})
}
