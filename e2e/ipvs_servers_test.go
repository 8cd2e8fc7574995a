package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"nodeproxy/e2e/harness"
)

func annotated(key, value string) func(*v1.Service) {
	return func(s *v1.Service) { s.Annotations = map[string]string{key: value} }
}

const schedulerAnnotation = "nodeproxy.io/ipvs-scheduler"

// TestIPVSSchedulers: the one that a Service asks for; an unknown one is reported, and the default one is used; weights.
func TestIPVSSchedulers(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		const hash, unknown, weights, plain = 1, 2, 3, 4
		ready := w.Ready("n1a", "n2a", "n3a")
		for number, change := range map[int]func(*v1.Service){
			hash:    annotated(schedulerAnnotation, "sh"),
			unknown: annotated(schedulerAnnotation, "best"),
			weights: annotated(schedulerAnnotation, "wrr"),
			plain:   func(*v1.Service) {},
		} {
			s := harness.Service(fmt.Sprintf("s-%d", number), number, change)
			objects := harness.Objects(s, ready...)
			for _, o := range objects {
				if slice, ok := o.(*discovery.EndpointSlice); ok && number == weights {
					slice.Annotations = map[string]string{"nodeproxy.io/weights": fmt.Sprintf("%s=3,%s=2",
						slice.Endpoints[0].Addresses[0], slice.Endpoints[1].Addresses[0])}
				}
			}
			w.Write(t, s.Name+".yaml", objects...)
		}
		d := w.Run(t, variant, clusterCIDR, "--ipvs-scheduler=lc")
		assert.NoError(t, d.WaitFor(harness.Limit, "level=WARN", "s-2", "best"))
		servers := virtualServers(t, w)
		for number, want := range map[int]string{hash: "sh -b sh-fallback", unknown: "lc", weights: "wrr", plain: "lc"} {
			for _, family := range families {
				for _, to := range []netip.AddrPort{clusterIP(number, family), vip(number, family), externalIP(number, family)} {
					if line := fmt.Sprintf("-A -t %s -s %s\n", to, want); !strings.Contains(servers, line) {
						t.Errorf("no %q in\n%s", line, servers)
					}
				}
			}
		}
		for _, family := range families {
			for _, to := range frontends(w, hash, family) {
				stickyServer(t, w.Client, "tcp", to)
				stickyServer(t, w.Pod("n1c").Host, "tcp", to)
			}
			for _, to := range frontends(w, weights, family) {
				got := spread(t, w.Client, to, 30)
				if got["n1a"] != 15 || got["n2a"] != 10 || got["n3a"] != 5 {
					t.Errorf("%s, weights 3, 2 and 1: 30 requests were answered by %v", to, got)
				}
			}
		}
	})
}

// TestIPVSForeignServersSurvive: virtual servers of somebody else within the ranges that are excluded, and those found by
// marks that are none of ours, are left alone through start, changes and restart. Others are not.
func TestIPVSForeignServersSurvive(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a")...)...)
		for _, server := range []string{"-t 172.30.0.9:80", "-t [fd00:30::9]:80", "-f 7", "-t 172.31.0.9:80"} {
			output(t, w, "ipvsadm -A "+server+" -s wlc")
			real := w.Pod("n2a").IP4
			if strings.Contains(server, "[") {
				real = w.Pod("n2a").IP6
			}
			output(t, w, "ipvsadm -a "+server+" -r "+netip.AddrPortFrom(real, 8080).String()+" -m -w 5")
		}
		foreign := func() string {
			var out []string
			for _, line := range strings.Split(virtualServers(t, w), "\n") {
				if strings.Contains(line, ":30") || strings.Contains(line, "172.30.") || strings.Contains(line, " -f 7 ") {
					out = append(out, line)
				}
			}
			return strings.Join(out, "\n")
		}
		before := foreign()
		if strings.Count(before, "\n") != 5 {
			t.Fatalf("this shows too little:\n%s", before)
		}
		check := func(when string) {
			t.Helper()
			if now := foreign(); now != before {
				t.Errorf("%s:\n%s\nwant:\n%s", when, now, before)
			}
			if now := virtualServers(t, w); strings.Contains(now, "172.31.") {
				t.Errorf("%s, what is not excluded is still there:\n%s", when, now)
			}
		}
		flags := []string{clusterCIDR, "--ipvs-exclude-cidrs=172.30.0.0/16,fd00:30::/64"}
		d := w.Run(t, variant, flags...)
		check("after the start")
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n2a")...)...)
		for _, family := range families {
			eventually(t, "edit", answers(w.Client, clusterIP(1, family), "n2a"))
		}
		check("after an edit")
		require.NoError(t, d.Stop())
		w.Run(t, variant, flags...)
		check("after a restart")
		w.Remove(t, "s.yaml")
		for _, family := range families {
			eventually(t, "no Service", ends(w.Client, nodePort(w.Node1().IP(family), 1), harness.Refused))
		}
		check("without Services")
	})
}

// TestIPVSStaleRemoved: what changed while nodeproxy did not run is put right at its start: virtual servers, entries of sets,
// addresses and rules that are not wanted any more, or that somebody removed.
func TestIPVSStaleRemoved(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		w.Write(t, "kept.yaml", harness.Objects(harness.Service("kept", 1), w.Ready("n1a", "n2a")...)...)
		d := w.Run(t, variant, clusterCIDR)
		want := held(t, w, variant)
		for i, change := range []func(*v1.Service){
			sticky(time.Hour), harness.Policies("Local", "Local"), sourceRanges("203.0.113.0/24"), harness.ClusterOnly,
		} {
			s := harness.Service(fmt.Sprintf("gone-%d", i), 10+i, change)
			w.Write(t, s.Name+".yaml", harness.Objects(s, w.Ready("n1b", "n3a")...)...)
		}
		for _, family := range families {
			eventually(t, "Services that will go", answers(w.Client, clusterIP(13, family), "n1b", "n3a"))
			eventually(t, "Services that will go", answers(w.Client, clusterIP(10, family), "n1b", "n3a"))
		}
		require.NoError(t, d.Kill())
		for i := range 4 {
			w.Remove(t, fmt.Sprintf("gone-%d.yaml", i))
		}
		kept := clusterIP(1, 4).String()
		output(t, w, "ipvsadm -d -t "+kept+" -r "+netip.AddrPortFrom(w.Pod("n2a").IP4, 8080).String())
		output(t, w, "ipvsadm -E -t "+kept+" -s sh -p 30")
		output(t, w, "ipvsadm -D -t "+vip(1, 4).String())
		output(t, w, "ipset del KUBE-CLUSTER-IP 10.96.0.11,tcp:80")
		output(t, w, "ipset add KUBE-NO-ENDPOINTS 10.96.0.11,udp:80")
		output(t, w, "ip addr del "+vip(1, 4).Addr().String()+"/32 dev kube-ipvs0")
		output(t, w, "ip addr add 10.11.12.13/32 dev kube-ipvs0")
		rule(t, w, variant, "-t mangle -F KUBE-IPVS-MARK")
		rule(t, w, variant, "-t nat -F KUBE-POSTROUTING")
		w.Run(t, variant, clusterCIDR)
		eventually(t, "all as before", func() error {
			if now := held(t, w, variant); now != want {
				return fmt.Errorf("%s", firstDifference(want, now))
			}
			return nil
		})
		for _, family := range families {
			wantServers(t, w.Client, vip(1, family), "n1a", "n2a")
			wantSource(t, w.Client, clusterIP(1, family), w.Node1().IP(family))
		}
	})
}
