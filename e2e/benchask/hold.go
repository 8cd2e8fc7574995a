package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"nodeproxy/e2e/measure"
	"nodeproxy/inspect"
	"nodeproxy/nftables"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/proxier"
	"nodeproxy/source/manifest"
)

// holdGoal is for how long a question may keep a sync from what is known of the objects.
const holdGoal = 10 * time.Millisecond

// hold is for how long one question keeps the state from changing, which is how long a sync may have to wait for it.
type hold struct {
	path string
	each []time.Duration // the longest of each time that it is asked
}

// measureHolds asks the questions over the same manifests within this process, where it can be seen how long each of them holds the lock
// that a sync needs. What the rest of an answer takes is not in it.
func measureHolds(l *lab, o options) ([]hold, error) {
	batch, err := manifest.Load(manifest.Config{Path: l.Manifests})
	if err != nil {
		return nil, err
	}
	state := proxier.NewState(l.Node1().Name, plan.Settings{}, plan.Families[:], nil)
	state.Apply(batch)
	state.Update()
	var publisher plan.Publisher
	publisher.Publish(state.Plan(), plan.Everything())
	var longest time.Duration
	node := &inspect.Node{
		Mode:       o.mode,
		Programmed: publisher.Latest,
		History:    &inspect.History{},
		Self:       func() inspect.Self { return inspect.Self{} },
		View: func(read func(*proxier.State)) {
			begun := time.Now()
			read(state)
			longest = max(longest, time.Since(begun))
		},
		Machine: func(_, near *plan.Plan, f plan.Family, _ func(netip.Addr) bool) (*packetsim.Machine, error) {
			return nftables.Machine(near, f, nftables.Options{}), nil // Any mode's: the lock is not held meanwhile.
		},
	}
	svc := l.cluster.Services[o.services/2]
	named := "?" + url.Values{"namespace": {measure.Namespace}, "name": {svc.Name}}.Encode()
	unknown := "?" + url.Values{"namespace": {measure.Namespace}, "name": {svc.Name + "x"}}.Encode()
	trace := "?" + url.Values{"from": {"outside"}, "to": {svc.Frontend().String()}, "protocol": {"TCP"}}.Encode()
	handler := inspect.Handler(func() *inspect.Node { return node })
	var out []hold
	for _, q := range []struct {
		path, query string
		status      int
	}{
		{"/v1/services", "", http.StatusOK}, {"/v1/explain", named, http.StatusOK}, {"/v1/explain of an unknown Service", unknown, http.StatusNotFound},
		{"/v1/trace", trace, http.StatusOK}, {"/v1/findings", "", http.StatusOK}, {"/v1/status", "", http.StatusOK}, {"/v1/desired (diff)", "", http.StatusOK},
	} {
		h := hold{path: q.path}
		path, _, _ := strings.Cut(q.path, " ")
		for range o.rounds {
			longest = 0
			w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, path+q.query, nil)
			r.ProtoMinor = 0 // Then the answer does not begin with a status that the recorder would take for the last one.
			handler.ServeHTTP(w, r)
			if w.Code != q.status {
				return nil, fmt.Errorf("%s: %d %s", q.path, w.Code, w.Body)
			}
			h.each = append(h.each, longest)
		}
		out = append(out, h)
	}
	return out, nil
}
