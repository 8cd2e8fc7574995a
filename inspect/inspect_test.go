package inspect

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/netip"
	"net/textproto"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// manyServices returns a Node with n Services default/s-0 and so on, of two endpoints each, and the time that Views have taken in all.
func manyServices(tb testing.TB, n int) (*Node, func() time.Duration) {
	tb.Helper()
	batch := source.Batch{
		Services: map[types.NamespacedName]*v1.Service{}, EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{}, Synced: true,
	}
	port, tcp, name, node, other := int32(8080), v1.ProtocolTCP, "", "node1", "node2"
	for i := range n {
		id := types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("s-%d", i)}
		ip := fmt.Sprintf("10.96.%d.%d", i/250, i%250+1)
		batch.Services[id] = &v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: id.Namespace, Name: id.Name},
			Spec: v1.ServiceSpec{
				ClusterIP: ip, ClusterIPs: []string{ip}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
				Ports: []v1.ServicePort{{Port: 80, Protocol: tcp}},
			},
		}
		batch.EndpointSlices[id] = &discovery.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: id.Namespace, Name: id.Name, Labels: map[string]string{discovery.LabelServiceName: id.Name}},
			AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &name, Port: &port, Protocol: &tcp}},
			Endpoints: []discovery.Endpoint{
				{Addresses: []string{fmt.Sprintf("10.244.%d.%d", i/250, i%250+1)}, NodeName: &node}, {Addresses: []string{fmt.Sprintf("10.245.%d.%d", i/250, i%250+1)}, NodeName: &other},
			},
		}
	}
	state := proxier.NewState("node1", plan.Settings{}, plan.Families[:], nil)
	state.Apply(batch)
	state.Update()
	var mu sync.Mutex
	var held time.Duration
	view := func(read func(*proxier.State)) {
		mu.Lock()
		defer mu.Unlock()
		begin := time.Now()
		read(state)
		held += time.Since(begin)
	}
	return &Node{Mode: "iptables", View: view}, func() time.Duration {
		mu.Lock()
		defer mu.Unlock()
		return held
	}
}

// BenchmarkAnswers measures answers about 10,000 Services, and for how long one keeps a sync from beginning.
func BenchmarkAnswers(b *testing.B) {
	const services = 10000
	for name, ask := range map[string]func(n *Node) error{
		"get":     func(n *Node) error { _ = n.ServicePorts(plan.Service{}); return nil },
		"explain": func(n *Node) error { _, err := n.Explain(plan.Service{Namespace: "default", Name: "s-77"}); return err },
		"unknown": func(n *Node) error {
			if _, err := n.Explain(plan.Service{Namespace: "default", Name: "x-77"}); err == nil {
				return errors.New("it is known")
			}
			return nil
		},
	} {
		b.Run(name, func(b *testing.B) {
			n, held := manyServices(b, services)
			for b.Loop() {
				require.NoError(b, ask(n))
			}
			b.ReportMetric(float64(held().Nanoseconds())/float64(b.N), "ns-held/op")
		})
	}
}

// BenchmarkList measures what it costs the daemon to send a list of 10,000 Services.
func BenchmarkList(b *testing.B) {
	n, _ := manyServices(b, 10000)
	handler, w := Handler(func() *Node { return n }), discard{http.Header{}}
	r := httptest.NewRequest(http.MethodGet, "/v1/services", nil)
	b.ReportAllocs()
	for b.Loop() {
		handler.ServeHTTP(w, r)
	}
}

// discard is where an answer goes that nobody reads.
type discard struct{ header http.Header }

func (d discard) Header() http.Header            { return d.header }
func (d discard) WriteHeader(int)                {}
func (d discard) Write(data []byte) (int, error) { return len(data), nil }

// TestRowsInPieces: a list is sent as it is made, in the form of encoding/json, and nothing more is made for a client that has gone.
func TestRowsInPieces(t *testing.T) {
	t.Parallel()
	n, _ := manyServices(t, 1000)
	for _, of := range []plan.Service{{}, {Namespace: "default", Name: "s-1"}, {Name: "none"}} {
		var got pieces
		require.NoError(t, write(&got, n.servicePorts(of)))
		list, all := []ServicePort{}, bytes.Join(got, nil)
		require.NoError(t, json.Unmarshal(all, &list))
		require.Equal(t, len(n.ServicePorts(of)), len(list))
		if of == (plan.Service{}) && (len(list) < 1000 || len(got) < len(all)>>15) {
			t.Errorf("%d rows in %d pieces of %d bytes", len(list), len(got), len(all))
		}
	}
	made := 0
	err := write(brokenPipe{}, iter.Seq[ServicePort](func(yield func(ServicePort) bool) {
		for row := range n.servicePorts(plan.Service{}) {
			if made++; !yield(row) {
				return
			}
		}
	}))
	if err == nil || made > 500 {
		t.Errorf("for nobody, %d rows are made: %v", made, err)
	}
}

// pieces are what is written, each at once.
type pieces [][]byte

func (p *pieces) Write(data []byte) (int, error) {
	*p = append(*p, bytes.Clone(data))
	return len(data), nil
}

// brokenPipe is where nobody reads any more.
type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

// serve answers by what node returns at the socket with the path that it returns, and returns a Client of it, and what ends that before the test does.
func serve(t *testing.T, node func() *Node) (client *Client, path string, end func()) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "s")
	l, err := Listen(path)
	require.NoError(t, err)
	var running sync.WaitGroup
	running.Go(func() {
		assert.NoError(t, Serve(l, Handler(node)))
	})
	client = NewClient(path)
	end = func() {
		client.http.CloseIdleConnections()
		l.Close()
		running.Wait()
	}
	t.Cleanup(end)
	return client, path, end
}

// TestClient: answers, errors and the lack of an answer come through a socket as they are.
func TestClient(t *testing.T) {
	t.Parallel()
	n, _ := manyServices(t, 12)
	refused := plan.Key{Service: plan.Service{Namespace: "default", Name: "s-1"}, Protocol: plan.TCP, Family: plan.IPv4}
	n.Refused = func() []plan.Refusal { return []plan.Refusal{{Key: refused}} }
	n.Programmed = func() *plan.Snapshot { return nil }
	var node atomic.Pointer[Node]
	client, path, end := serve(t, node.Load)

	var answer *AnswerError
	if _, err := client.Findings(t.Context()); !errors.As(err, &answer) || answer.Status != http.StatusServiceUnavailable {
		t.Errorf("without an answer: %v", err)
	}
	node.Store(n)
	list, err := client.ServicePorts(t.Context(), plan.Service{Namespace: "default"})
	if err != nil || len(list) != 12 {
		t.Fatalf("%d ServicePorts, %v", len(list), err)
	}
	for _, sp := range list {
		if want := map[bool]string{true: Refused, false: Pending}[sp.Name == "s-1"]; sp.State != want {
			t.Errorf("%s is %s, want %s", sp.Name, sp.State, want)
		}
	}
	if list, err := client.ServicePorts(t.Context(), plan.Service{Namespace: "other"}); err != nil || list == nil || len(list) != 0 {
		t.Errorf("of another namespace: %v, %v", list, err)
	}
	one := plan.Service{Namespace: "default", Name: "s-1"}
	if list, err := client.CountedServicePorts(t.Context(), one); err != nil || len(list) == 0 ||
		slices.ContainsFunc(list, func(sp ServicePort) bool { return sp.Name != one.Name }) {
		t.Errorf("of %s: %v, %v", one, list, err)
	}
	e, err := client.Explain(t.Context(), plan.Service{Namespace: "default", Name: "s-1"})
	if err != nil || !e.Problem() || !slices.ContainsFunc(e.Diagnoses, func(d Diagnosis) bool { return d.Code == RefusedByKernel }) {
		t.Errorf("the refused one: %+v, %v", e, err)
	}
	e, err = client.Explain(t.Context(), plan.Service{Namespace: "default", Name: "s-2"})
	if err != nil || !slices.ContainsFunc(e.Diagnoses, func(d Diagnosis) bool { return d.Code == NotYetProgrammed }) {
		t.Errorf("the pending one: %+v, %v", e, err)
	}
	_, err = client.Explain(t.Context(), plan.Service{Namespace: "other", Name: "S-3"})
	if !errors.As(err, &answer) || answer.Status != http.StatusNotFound || !strings.Contains(err.Error(), "did you mean default/s-3?") {
		t.Errorf("an unknown one: %v", err)
	}
	if _, err := client.Trace(t.Context(), TraceQuery{From: "node", To: "node:80"}); !errors.As(err, &answer) || !answer.BadRequest() {
		t.Errorf("a trace before anything is programmed: %v", err)
	}
	findings, err := client.Findings(t.Context())
	if err != nil || len(findings) != 1 || findings[0].Object != "Service default/s-1" {
		t.Errorf("findings: %+v, %v", findings, err)
	}
	end()
	if _, err := NewClient(path).Findings(t.Context()); err == nil {
		t.Error("a closed socket answers")
	}
}

// TestSilence: a process that accepts a question and does not answer it holds nobody for long, and one that takes its time is waited for.
func TestSilence(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("unix", filepath.Join(t.TempDir(), "silent")) // The kernel accepts; nobody reads.
	require.NoError(t, err)
	defer silent.Close()
	client := NewClient(silent.Addr().String())
	client.patience = time.Millisecond
	var none *SilentError
	if _, err := client.Findings(t.Context()); !errors.As(err, &none) || none.Began || !strings.Contains(err.Error(), "there was no sign of it for 1ms") {
		t.Errorf("a process that hangs: %v", err)
	}

	release, asked := make(chan struct{}), make(chan struct{}, 2)
	n, _ := manyServices(t, 1)
	client, _, _ = serve(t, func() *Node { asked <- struct{}{}; <-release; return n })
	client.longest = 10 * time.Second // in which it takes the question, and gives no answer
	if _, err := client.Findings(t.Context()); !errors.As(err, &none) || !none.Began || !strings.Contains(err.Error(), "has taken the question") {
		t.Errorf("one that takes too long: %v", err)
	}
	<-asked
	client.longest = time.Minute
	signs := make(chan struct{})
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(int, textproto.MIMEHeader) error { close(signs); return nil },
	})
	answer := make(chan error, 1)
	go func() {
		_, err := client.Findings(ctx)
		answer <- err
	}()
	<-signs
	select {
	case err := <-answer:
		t.Errorf("an answer before there is one: %v", err)
	default:
	}
	close(release)
	assert.NoError(t, <-answer, "one that takes its time")
}

// TestRulesStay: a Service of a file that could not be read at the start may still have rules, and explain and trace say so.
func TestRulesStay(t *testing.T) {
	t.Parallel()
	n, _ := manyServices(t, 1)
	n.View(func(s *proxier.State) {
		s.Apply(source.Batch{Extent: source.Partial})
		s.Update()
	})
	n.Findings = func() []source.Finding {
		return []source.Finding{{Severity: source.Problem, Where: "m/a.yaml:3", Object: "Service default/web", Detail: "wrong", Effect: "the Service is not proxied"}}
	}
	e, err := n.Explain(plan.Service{Namespace: "default", Name: "web"})
	require.NoError(t, err)
	if len(e.Diagnoses) != 2 || e.Diagnoses[0].Severity != problem || e.Diagnoses[1].Code != RulesStay {
		t.Errorf("explain web: %+v", e.Diagnoses)
	}
	if _, err := n.Explain(plan.Service{Namespace: "default", Name: "api"}); err == nil || !strings.Contains(err.Error(), rulesStay) {
		t.Errorf("explain api: %v", err)
	}
	n.Machine = func(_, _ *plan.Plan, f plan.Family, _ func(netip.Addr) bool) (*packetsim.Machine, error) {
		return packetsim.New(f), nil
	}
	for to, want := range map[string]string{"10.96.3.3:80": rulesStay[1:], "web": "explain default/web"} {
		said := ""
		if tr, err := n.Trace(TraceQuery{From: "192.0.2.1", To: to, Namespace: "default"}); err != nil {
			said = err.Error()
		} else {
			said = strings.Join(tr.Packets[0].Notes, " ")
		}
		if !strings.Contains(said, want) {
			t.Errorf("trace %s says %q, want %q", to, said, want)
		}
	}
}

// TestElsewhere: the client that stands for those without access is not one of those with it.
func TestElsewhere(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		ranges, want string
	}{
		{"192.0.2.0/24", "198.51.100.7"},
		{"198.51.100.0/24", "203.0.113.7"},
		{"198.51.100.0/24 203.0.113.0/24", "192.0.2.7"},
		{"0.0.0.0/0", ""},
		{"2001:db8::/32", "3fff::7"},
	} {
		var ranges []netip.Prefix
		for _, r := range strings.Fields(tt.ranges) {
			ranges = append(ranges, netip.MustParsePrefix(r))
		}
		got, ok := elsewhere(plan.FamilyOf(ranges[0].Addr()), ranges)
		if ok != (tt.want != "") || ok && got.String() != tt.want {
			t.Errorf("not in %s: %s, %t, want %s", tt.ranges, got, ok, tt.want)
		}
	}
}

func TestPrintable(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"web-1":           "web-1",
		`port "http"`:     `port "http"`,
		"Zürich":          "Zürich",
		"a\x1b[2J\n\"b\"": `a\x1b[2J\n"b"`,
		"\u202egnp":       `\u202egnp`,
		"\xff":            `\xff`,
		"a\tb":            `a\tb`,
	} {
		if got := Printable(in); got != want {
			t.Errorf("%q becomes %q, want %q", in, got, want)
		}
	}
}
