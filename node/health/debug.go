package health

import (
	"fmt"
	"net/http"
	"net/http/pprof"
)

// Debug says what the debug endpoints show.
type Debug struct {
	// Metrics serves /metrics; nil for not found.
	Metrics http.Handler
	// SLIs serves /metrics/slis; nil for not found.
	SLIs http.Handler
	// Mode is the proxy mode, such as iptables; empty while none is in force.
	Mode string
	// Config is shown at /configz as JSON: a KubeProxyConfiguration of version v1alpha1 with its kind and apiVersion set. Nil
	// if there is none to show.
	Config any
	// Profiling serves /debug/pprof.
	Profiling bool
	// UI serves /ui/ and what is below it; nil for not found.
	UI http.Handler
}

// configGroup is the API group under which kube-proxy shows its configuration.
const configGroup = "kubeproxy.config.k8s.io"

// Handler serves /metrics, /metrics/slis, /healthz ("ok" as long as the program runs), /proxyMode, /configz and, with Profiling,
// /debug/pprof, each as kube-proxy does at its metrics port, and UI.
func (d Debug) Handler() http.Handler {
	mux := http.NewServeMux()
	if d.Metrics != nil {
		mux.Handle("/metrics", d.Metrics)
	}
	if d.SLIs != nil {
		mux.Handle("/metrics/slis", d.SLIs)
	}
	mux.HandleFunc("/healthz", pong)
	mux.HandleFunc("/healthz/ping", pong)
	mux.HandleFunc("/proxyMode", func(w http.ResponseWriter, _ *http.Request) { writeText(w, d.Mode) })
	mux.HandleFunc("/configz", func(w http.ResponseWriter, _ *http.Request) {
		shown := map[string]any{}
		if d.Config != nil {
			shown[configGroup] = d.Config
		}
		writeJSON(w, http.StatusOK, shown)
	})
	if d.UI != nil {
		mux.Handle("/ui/", d.UI)
	}
	if d.Profiling {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	return mux
}

// profiles is the path of profiles, which take as long as the request asks for.
const profiles = "/debug/pprof/"

// pong answers as Kubernetes components do that check nothing but that they run.
func pong(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Has("verbose") {
		writeText(w, "[+]ping ok\nhealthz check passed\n")
		return
	}
	writeText(w, "ok")
}

func writeText(w http.ResponseWriter, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = fmt.Fprint(w, text)
}
