// Package ui serves a page that shows the Services of this node to a browser: a table of them, a drawing of one with all that happens to
// its traffic, and how long syncs took. The page only reads, loads nothing from elsewhere, and takes no name or message for markup.
package ui

import (
	"embed"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"nodeproxy/inspect"
)

// Access says who gets the page.
type Access string

const (
	// Nobody gets it.
	Nobody Access = "false"
	// FromNode is for clients on this node that connect to a loopback address: its users, pods in its network namespace, and what is
	// forwarded there, as by ssh or kubectl port-forward. The page has names and addresses that a metrics port need not show to all
	// who can reach it.
	FromNode Access = "node"
	// Anybody who reaches the port gets it.
	Anybody Access = "true"
)

// Path is where the page is, and below it what it is made of.
const Path = "/ui/"

//go:embed page
var page embed.FS

// answers are the questions of package inspect that the page asks.
var answers = []string{"services", "explain", "findings", "history"}

// mostAtOnce is how many answers are computed at once: a page is less important than the proxy.
const mostAtOnce = 2

// A client has stall to take each piece of an answer and longest for all of it: who does not read must not keep others from a place.
const (
	piece   = 64 << 10
	stall   = 2 * time.Second
	longest = 10 * time.Second
)

// patient writes an answer in pieces, each with a deadline.
type patient struct {
	http.ResponseWriter
	conn *http.ResponseController
	end  time.Time // zero before the first piece
}

// WriteHeader leaves out that an answer takes a while: a browser does not need it, and it would be written without a deadline.
func (p *patient) WriteHeader(code int) {
	if code >= http.StatusOK {
		p.ResponseWriter.WriteHeader(code)
	}
}

func (p *patient) Write(data []byte) (n int, err error) {
	if p.end.IsZero() {
		p.end = time.Now().Add(longest)
	}
	for some := range slices.Chunk(data, piece) {
		deadline := time.Now().Add(stall)
		if deadline.After(p.end) {
			deadline = p.end
		}
		_ = p.conn.SetWriteDeadline(deadline) // A recorder in a test has none.
		m, err := p.ResponseWriter.Write(some)
		if n += m; err != nil {
			return n, err
		}
	}
	return n, nil
}

// Handler serves the page below Path, with the answers that node gives; see inspect.Handler. It looks at nothing but what is known: a page
// that asks again and again must cost little, and who may see it need not know which connections there are.
func Handler(node func() *inspect.Node, access Access) http.Handler {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err) // It is embedded.
	}
	mux := http.NewServeMux()
	mux.Handle("GET "+Path, http.StripPrefix(Path, http.FileServerFS(files)))
	inner, places := inspect.Handler(func() *inspect.Node {
		n := node()
		if n == nil {
			return nil
		}
		known := *n
		known.Reality = nil
		return &known
	}), make(chan struct{}, mostAtOnce)
	limited := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case places <- struct{}{}:
			defer func() { <-places }()
			inner.ServeHTTP(&patient{ResponseWriter: w, conn: http.NewResponseController(w)}, r)
		case <-r.Context().Done():
		}
	})
	for _, a := range answers {
		mux.Handle("GET "+Path+"v1/"+a, http.StripPrefix("/ui", limited))
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if access != Anybody && !fromNode(r) {
			http.Error(w, "the page is for clients on this node, at a loopback address; --ui=true serves it to all who reach this port", http.StatusForbidden)
			return
		}
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "+
			"form-action 'none'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		mux.ServeHTTP(w, r)
	})
}

// fromNode reports whether a request comes from this node, and was meant for it: a page from elsewhere can have its name resolve to a
// loopback address, but not change the name.
func fromNode(r *http.Request) bool {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil || !peer.Addr().Unmap().IsLoopback() {
		return false
	}
	host, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		host = r.Host
	}
	if host == "localhost" {
		return true
	}
	_, err = netip.ParseAddr(host)
	return err == nil
}
