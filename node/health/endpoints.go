package health

import (
	"encoding/json"
	"net/http"
	"time"

	"nodeproxy/source"
)

// Handler serves /healthz, /livez and /readyz.
//
// /healthz and /livez have kube-proxy's paths, status codes (200 or 503), headers and JSON, with three differences:
//
//   - /healthz is 503 until the first sync has succeeded, be it one of an empty cluster: before that the node forwards
//     nothing of what it should, and load balancers are to leave it out. In kube-proxy it is 200 from the start. /livez is 200
//     meanwhile, since a restart would not help; it turns to 503 only when a change has waited for longer than the timeout.
//     That clock starts when all objects have been delivered, so an API server that can't be reached kills nobody.
//   - lastUpdated is when the last successful sync ended; year 1 if there was none. In kube-proxy it is the current time
//     while all is well.
//   - program says whose answer it is: while a kube-proxy has the port, the answers are its own.
//
// /livez does not depend on whether the node is about to be removed (KEP-3836).
//
// /readyz is 200 when all objects have been delivered, the source can read everything, the rules have been written, no change has
// waited for too long, and the objects are not stale. Its JSON names what is missing. /readyz?verify has a verification besides, and is 200 only
// if that has compared everything and found nothing.
func (n *Node) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", n.healthz)
	mux.HandleFunc("/livez", n.livez)
	mux.HandleFunc("/readyz", n.readyz)
	return mux
}

// familyAnswer and nodeAnswer are the body of /healthz and /livez, with kube-proxy's names in its order.
type familyAnswer struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

type nodeAnswer struct {
	LastUpdated  time.Time               `json:"lastUpdated"`
	CurrentTime  time.Time               `json:"currentTime"`
	NodeEligible *bool                   `json:"nodeEligible,omitempty"`
	Healthy      bool                    `json:"healthy"`
	Status       map[string]familyAnswer `json:"status,omitempty"`
	// Program is a field that kube-proxy does not have.
	Program string `json:"program,omitempty"`
}

func (n *Node) answer(s state, healthy bool) nodeAnswer {
	out := nodeAnswer{LastUpdated: s.programmed, CurrentTime: s.now, Healthy: healthy, Status: map[string]familyAnswer{}, Program: n.cfg.Program}
	for _, f := range n.cfg.Families {
		out.Status[f.String()] = familyAnswer{LastUpdated: s.programmed, Healthy: healthy}
	}
	return out
}

func (n *Node) healthz(w http.ResponseWriter, r *http.Request) {
	s := n.state()
	out := n.answer(s, s.inStep)
	eligible := !s.leaving
	out.NodeEligible = &eligible
	n.reply(w, r, s.inStep && eligible, out)
}

func (n *Node) livez(w http.ResponseWriter, r *http.Request) {
	s := n.state()
	n.reply(w, r, s.alive, n.answer(s, s.alive))
}

// readyAnswer is the body of /readyz. It has no lastUpdated before the first sync has succeeded.
type readyAnswer struct {
	Ready       bool          `json:"ready"`
	Missing     []Missing     `json:"missing"`
	LastUpdated time.Time     `json:"lastUpdated,omitzero"`
	CurrentTime time.Time     `json:"currentTime"`
	Watches     []watchAnswer `json:"watches,omitempty"`
	Program     string        `json:"program,omitempty"`
	// Verification is what was asked for.
	Verification *source.Verification `json:"verification,omitempty"`
}

type watchAnswer struct {
	Resource string `json:"resource"`
	Synced   bool   `json:"synced"`
	// AgeSeconds is -1 before the first answer.
	AgeSeconds float64 `json:"ageSeconds"`
	Failure    string  `json:"failure,omitempty"`
}

func (n *Node) readyz(w http.ResponseWriter, r *http.Request) {
	s, watches := n.state(), n.watches()
	out := readyAnswer{Missing: n.missing(s, watches), LastUpdated: s.programmed, CurrentTime: s.now, Program: n.cfg.Program}
	out.Ready = len(out.Missing) == 0
	for _, watch := range watches {
		age := -1.0
		if watch.Age >= 0 {
			age = watch.Age.Seconds()
		}
		out.Watches = append(out.Watches, watchAnswer{watch.Resource, watch.Synced, age, watch.Failure})
	}
	if n.cfg.Verify == nil || !r.URL.Query().Has("verify") {
		n.reply(w, r, out.Ready, out)
		return
	}
	v := n.cfg.Verify(r.Context())
	out.Verification = &v
	code := http.StatusOK
	if !out.Ready || !v.Good() {
		code = http.StatusServiceUnavailable
	}
	writeJSON(w, code, out) // It is not counted as an answer to a probe.
}

func (n *Node) reply(w http.ResponseWriter, r *http.Request, good bool, body any) {
	code := http.StatusOK
	if !good {
		code = http.StatusServiceUnavailable
	}
	n.cfg.Answered(r.URL.Path, code)
	writeJSON(w, code, body)
}

// writeJSON answers with a value as JSON.
func writeJSON(w http.ResponseWriter, code int, body any) {
	text, err := json.Marshal(body)
	if err != nil { // Only a value of this package's caller can fail to encode.
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = w.Write(text) // The client may be gone.
}
