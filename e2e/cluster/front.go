package cluster

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"nodeproxy/e2e/harness"
)

// Front is a server before the API server, as a load balancer is, by which some clients reach it. It can make them list everything again, and
// it can lose events of their watches.
type Front struct {
	url   string
	proxy *httputil.ReverseProxy

	mu sync.Mutex
	// open are the watches that are under way. expired are those, by their keys, that have been ended and are to find, when the client asks
	// for them again, that the version from which they would go on is forgotten.
	open    map[*http.Request]frontWatch
	expired map[string]bool
	// losing returns whether to lose an event of a watch, as it is sent; nil to lose none.
	losing func(event []byte) bool
}

// frontWatch is a watch through a Front: its client and what that watches, and how it is ended.
type frontWatch struct {
	key string
	end context.CancelFunc
}

const frontPort = "6444"

// Front starts one on the host of the control plane, with the API server's certificate. It ends with the World.
func (c *ControlPlane) Front(w *harness.World) (*Front, error) {
	certificate, err := tls.LoadX509KeyPair(c.file("apiserver.crt"), c.file("apiserver.key"))
	if err != nil {
		return nil, err
	}
	transport, err := rest.TransportFor(c.Via(c.host.Netns, &rest.Config{}))
	if err != nil {
		return nil, err
	}
	address := net.JoinHostPort(c.host.IP4.String(), frontPort)
	listener, err := harness.In(c.host.Netns, func() (net.Listener, error) { return net.Listen("tcp", address) })
	if err != nil {
		return nil, err
	}
	target, err := url.Parse(c.URL())
	if err != nil {
		return nil, err
	}
	f := &Front{url: "https://" + address, open: map[*http.Request]frontWatch{}, expired: map[string]bool{}}
	quiet := log.New(io.Discard, "", 0) // Each watch that is ended would be reported.
	f.proxy = &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, Transport: transport, FlushInterval: -1, ErrorLog: quiet,
		ModifyResponse: func(r *http.Response) error {
			r.Body = ending{r.Body, r.Request.Context()}
			if r.Header.Get("Content-Type") == runtime.ContentTypeProtobuf+";stream=watch" {
				r.Body = &losing{ReadCloser: r.Body, loses: f.loses}
			}
			return nil
		},
	}
	server := &http.Server{Handler: f, ErrorLog: quiet, TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate}}}
	w.AtEnd(func() { _ = server.Close() })
	go func() { _ = server.ServeTLS(listener, "", "") }()
	return f, nil
}

// Redirect makes the client that has a kubeconfig file use the Front.
func (f *Front) Redirect(c *ControlPlane, kubeconfig string) error {
	text, err := os.ReadFile(kubeconfig)
	if err != nil {
		return err
	}
	return os.WriteFile(kubeconfig, []byte(strings.ReplaceAll(string(text), c.URL(), f.url)), 0o600)
}

// Expire ends all watches of the client at an address, and waits until it has asked for each of them again. The answer is that the version
// from which it would go on is forgotten, as an API server says that has been started again; so it has to list everything.
func (f *Front) Expire(client netip.Addr) error {
	f.mu.Lock()
	for _, w := range f.open {
		if strings.HasPrefix(w.key, client.String()+" ") {
			f.expired[w.key] = true
			w.end()
		}
	}
	missing := slices.Collect(maps.Keys(f.expired))
	f.mu.Unlock()
	if len(missing) == 0 {
		return fmt.Errorf("%s watches nothing", client)
	}
	for begun := time.Now(); len(missing) > 0; time.Sleep(10 * time.Millisecond) {
		if time.Since(begun) > harness.Limit {
			return fmt.Errorf("not watched again within %s: %q", harness.Limit, missing)
		}
		f.mu.Lock()
		missing = slices.Collect(maps.Keys(f.expired))
		f.mu.Unlock()
	}
	return nil
}

// Lose loses, until stop is called, the events of all watches that are sent in protobuf and contain a text, such as the name of an object.
// lost returns how many it has lost.
func (f *Front) Lose(text string) (lost func() int64, stop func()) {
	var count atomic.Int64
	set := func(losing func([]byte) bool) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.losing = losing
	}
	set(func(event []byte) bool {
		loses := bytes.Contains(event, []byte(text))
		if loses {
			count.Add(1)
		}
		return loses
	})
	return count.Load, func() { set(nil) }
}

func (f *Front) loses(event []byte) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.losing != nil && f.losing(event)
}

func (f *Front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if q.Get("watch") != "true" {
		f.proxy.ServeHTTP(w, r)
		return
	}
	client, _, _ := net.SplitHostPort(r.RemoteAddr)
	key := strings.Join([]string{client, r.URL.Path, q.Get("labelSelector"), q.Get("fieldSelector")}, " ")
	ctx, end := context.WithCancel(r.Context())
	defer end()
	f.mu.Lock()
	expired := f.expired[key] && !q.Has("sendInitialEvents") // That would be a list already.
	delete(f.expired, key)
	f.open[r] = frontWatch{key, end}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.open, r)
		f.mu.Unlock()
	}()
	if expired {
		status := apierrors.NewResourceExpired("too old resource version").Status()
		status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
		w.Header().Set("Content-Type", runtime.ContentTypeJSON)
		w.WriteHeader(http.StatusGone)
		_ = json.NewEncoder(w).Encode(status)
		return
	}
	f.proxy.ServeHTTP(w, r.WithContext(ctx))
}

// ending is the body of an answer. It is complete when its request is not wanted any more, as a watch is that has lasted for long enough.
type ending struct {
	io.ReadCloser
	request context.Context
}

func (e ending) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	if err != nil && e.request.Err() != nil {
		err = io.EOF
	}
	return n, err
}

// losing is the body of a watch in protobuf: events, each behind its length in four bytes.
type losing struct {
	io.ReadCloser
	loses func(event []byte) bool
	next  []byte // what is left of an event that is not lost
}

func (l *losing) Read(p []byte) (int, error) {
	for len(l.next) == 0 {
		var length [4]byte
		if _, err := io.ReadFull(l.ReadCloser, length[:]); err != nil {
			return 0, err
		}
		event := make([]byte, binary.BigEndian.Uint32(length[:]))
		if _, err := io.ReadFull(l.ReadCloser, event); err != nil {
			return 0, err
		}
		if !l.loses(event) {
			l.next = append(length[:], event...)
		}
	}
	n := copy(p, l.next)
	l.next = l.next[n:]
	return n, nil
}
