package cluster

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"nodeproxy/e2e/harness"
)

// dashboard: against a scrape of a daemon with an API server, all queries of the dashboard resolve, and without any trouble before, each panel
// shows something, but for packets and bytes, which only mode ipvs counts; and metrics of watches, requests and latencies are of that API server.
func dashboard(s *scenario) {
	s.must(s.daemon.Stop())
	s.daemon = s.lab.Run(s.T, s.variant, clusterCIDR, "--manifests=", "--kubeconfig="+s.kubeconfig, "--service-metrics=100", "--nftables-sync-period=1s")
	// Changes from before the start do not count for latencies, and times in objects have no fractions of a second.
	time.Sleep(1100 * time.Millisecond)
	svc := s.service()
	s.pod("n1a", "n2a")
	s.eventually("served", servers(s.Client, at(svc, 4), "n1a", "n2a"))
	s.latencyCounted()
	board, err := harness.ReadDashboard("../../deploy/dashboard/nodeproxy.json")
	s.must(err)
	s.eventually("panels", func() error {
		scrape := s.Node1().Scrape(s.T)
		var errs []error
		for _, p := range board.Panels {
			if err := scrape.Shows(p); err != nil && p.Title != "Packets" && p.Title != "Bytes" {
				errs = append(errs, fmt.Errorf("%s: %w", p.Title, err))
			}
		}
		return errors.Join(errs...)
	})
	drift := []string{s.variant.Tool("iptables"), "-w", "-t", "nat", "-F", "KUBE-SERVICES"}
	if harness.ModeUnderTest() == harness.NFTables {
		drift = []string{"nft", "flush", "map", "ip", "nodeproxy", "services"}
	}
	_, err = s.Node1().Output(drift[0], drift[1:]...)
	s.must(err)
	s.eventually("repaired drift", func() error {
		if s.Node1().Scrape(s.T).Sum("nodeproxy_drift_repaired_total") == 0 {
			return errors.New("none is counted")
		}
		return nil
	})
	scrape := s.Node1().Scrape(s.T) // That one may have been read while it was counted.
	queries, err := harness.DashboardQueries("../../deploy/dashboard/nodeproxy.json")
	s.must(err)
	if len(queries) < 40 {
		s.Errorf("the dashboard has only %d queries", len(queries))
	}
	for _, q := range queries {
		counted := !strings.Contains(q, "nodeproxy_service_packets_") && !strings.Contains(q, "nodeproxy_service_bytes_")
		if err := scrape.Resolve(q); (err == nil) != counted {
			s.Errorf("%s: %v", q, err)
		}
	}
	problems, err := promlint.New(strings.NewReader(scrape.Text)).Lint()
	s.must(err)
	for _, p := range problems {
		s.Errorf("%s: %s", p.Metric, p.Text)
	}
	s.watchMetrics(scrape)
}

// latencyCounted changes endpoints until it is counted how long that took. The controller says when a change was made only where it
// knows, which it does not when it has to try again.
func (s *scenario) latencyCounted() {
	s.Helper()
	s.eventually("the latency of a change", func() error {
		if s.Node1().Scrape(s.T).Sum("kubeproxy_network_programming_duration_seconds", "ip_family=IPv4") > 0 {
			return nil
		}
		s.gone("n2a")
		time.Sleep(1100 * time.Millisecond) // The time of a change is in whole seconds, and is to be another one.
		s.pod("n2a")
		time.Sleep(500 * time.Millisecond) // The controllers take a while, and what they write may not be counted.
		return errors.New("none is counted")
	})
}

// watchMetrics checks the metrics that only a daemon with an API server has.
func (s *scenario) watchMetrics(scrape *harness.Scrape) {
	s.Helper()
	for _, resource := range []string{"services", "endpointslices", "nodes"} {
		age := scrape.Sum("nodeproxy_watch_staleness_seconds", "resource="+resource)
		series := scrape.Select("nodeproxy_watch_staleness_seconds", "resource="+resource)
		if len(series) != 1 || math.IsNaN(age) || age < 0 || age > 60 {
			s.Errorf("%d series for %s, %v s old", len(series), resource, age)
		}
	}
	for _, metric := range []string{"rest_client_requests_total code=200 method=GET", "rest_client_request_duration_seconds",
		"kubeproxy_network_programming_duration_seconds ip_family=IPv4"} {
		f := strings.Fields(metric)
		if scrape.Sum(f[0], f[1:]...) == 0 {
			s.Errorf("%s is 0", metric)
		}
	}
	// With no news of a resource, what is known of it gets old; a change makes it fresh.
	age := func() float64 {
		return s.Node1().Scrape(s.T).Sum("nodeproxy_watch_staleness_seconds", "resource=endpointslices")
	}
	var old float64
	s.eventually("staleness", func() error {
		if old = age(); old < 1 {
			return fmt.Errorf("what is known is %v s old", old)
		}
		return nil
	})
	s.pod("n3a")
	s.eventually("fresh again", func() error {
		if now := age(); now >= old {
			return fmt.Errorf("%v s old after a change, and %v s before", now, old)
		}
		return nil
	})
}
