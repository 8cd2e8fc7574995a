package main

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"nodeproxy/inspect"
	"nodeproxy/plan"
	"nodeproxy/source"
	"nodeproxy/source/apiserver/apiservertest"
)

// putSlice gives Service s0 one endpoint.
func putSlice(w *world, endpoint string) {
	w.ever[netip.AddrPortFrom(clusterIP(0, plan.IPv4), 80)] = map[netip.AddrPort]bool{
		netip.MustParseAddrPort("10.244.1.1:8080"): true, netip.MustParseAddrPort("10.244.1.2:8080"): true}
	w.put("endpointslices", &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "s0-0", Labels: map[string]string{discovery.LabelServiceName: "s0"}},
		AddressType: discovery.AddressTypeIPv4, Endpoints: []discovery.Endpoint{{Addresses: []string{endpoint}}},
		Ports: []discovery.EndpointPort{{Name: ptr.To("a"), Protocol: ptr.To(v1.ProtocolTCP), Port: ptr.To[int32](8080)}}})
}

// TestWitness: an event that a watch has lost is found when somebody asks, with the next bookmark, and without being asked within the time that
// the documents give; it is named and repaired. A question soon after the last has its answer.
func TestWitness(t *testing.T) {
	for _, asks := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, 1, "iptables", t.TempDir())
			w.cluster.Pace, w.cluster.Travel = nil, nil
			putSlice(w, "10.244.1.1")
			w.put("services", &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s0"}, Spec: v1.ServiceSpec{ClusterIP: "10.96.0.10",
				ClusterIPs: []string{"10.96.0.10"}, Ports: []v1.ServicePort{{Name: "a", Port: 80, Protocol: v1.ProtocolTCP}}}})
			w.start()
			time.Sleep(time.Minute) // in simulated time: everything is programmed
			synctest.Wait()
			ask := func() (code int, v source.Verification) {
				r := httptest.NewRecorder()
				w.daemon.monitor.node.Handler().ServeHTTP(r, httptest.NewRequest("GET", "/readyz?verify", nil))
				var answer struct{ Verification source.Verification }
				if err := json.Unmarshal(r.Body.Bytes(), &answer); err != nil {
					t.Fatal(err)
				}
				return r.Code, answer.Verification
			}
			if asks {
				if code, v := ask(); code != 200 || !v.Good() || len(v.Compared) != 6 {
					t.Errorf("at first, %d %+v", code, v)
				}
			}
			w.cluster.Lock()
			w.cluster.Lose = func(apiservertest.Change) bool { return true }
			w.cluster.Unlock()
			putSlice(w, "10.244.1.2")
			time.Sleep(time.Second) // in simulated time: the watch goes on
			w.cluster.Lock()
			w.cluster.Lose = nil
			w.cluster.Unlock()
			lost, least := time.Now(), 8*time.Minute+verifyObjects
			if asks {
				least = 2 * time.Minute
				if code, v := ask(); code != 200 || v.Began.After(lost) {
					t.Errorf("a question soon after the last: %d %+v", code, v)
				}
				time.Sleep(verifyEvery / verifyAsked)
				for code, v := ask(); len(v.Differences) == 0; code, v = ask() {
					if code != 503 || v.Finished {
						t.Fatalf("before the bookmark, %d %+v", code, v)
					}
				}
			}
			synctest.Wait()
			last := func() source.Verification {
				w.daemon.witness.mu.Lock()
				defer w.daemon.witness.mu.Unlock()
				return w.daemon.witness.last.Verification
			}
			for len(last().Differences) == 0 {
				time.Sleep(time.Second) // in simulated time
				if synctest.Wait(); time.Since(lost) > least {
					t.Fatalf("not found within %v", least)
				}
			}
			t.Logf("asked: %t, found after %v", asks, time.Since(lost))
			time.Sleep(5 * time.Second) // in simulated time: it is repaired
			synctest.Wait()
			v := last()
			want := "EndpointSlice default/s0-0: metadata.resourceVersion: the API server has version "
			if !v.Finished || len(v.Differences) != 1 || !strings.HasPrefix(v.Differences[0].String(), want) {
				t.Errorf("the verification: %+v", v)
			}
			key := plan.Key{Service: plan.Service{Namespace: "default", Name: "s0"}, Port: "a", Protocol: plan.TCP, Family: plan.IPv4}
			sp := w.daemon.proxier.Snapshot().ServicePort(key)
			if sp == nil || sp.Endpoints.Cluster[0].Addr != netip.MustParseAddrPort("10.244.1.2:8080") {
				t.Errorf("it is not repaired: %+v", sp)
			}
			var status inspect.Status
			if status.SetVerification(&v); len(status.Wrong) != 1 || !strings.Contains(status.Wrong[0], "1 difference, and repaired it") {
				t.Errorf("status says %q", status.Wrong)
			}
			w.stop()
		})
	}
}

// TestWitnessReports: a few differences are an event each, all are in the log, and what the comparison with the kernel has reported is not
// reported again.
func TestWitnessReports(t *testing.T) {
	var logged bytes.Buffer
	var events []string
	w := &witness{last: &outcome{}, log: slog.New(slog.NewTextHandler(&logged, nil)), event: func(text string) { events = append(events, text) }}
	w.add(nil, []source.Difference{{Part: source.PartKernel, Object: "kernel", Detail: "1 rule"}})
	if logged.Len() > 0 || len(events) > 0 || len(w.last.Differences) != 1 {
		t.Errorf("of the kernel, %s, events %q, %v", &logged, events, w.last.Differences)
	}
	for range fewDifferences + 2 {
		w.last.Differences = append(w.last.Differences, source.Difference{Part: source.PartObjects, Object: "Service a", Detail: "gone"})
	}
	w.add(nil, w.last.Differences[1:])
	if n := strings.Count(logged.String(), `part=objects object="Service a"`); n != fewDifferences+2 || len(events) != fewDifferences+1 ||
		events[0] != "a verification has repaired Service a: gone" || events[fewDifferences] != "a verification has repaired 2 more differences" {
		t.Errorf("of objects, %s, events %q", &logged, events)
	}
}
