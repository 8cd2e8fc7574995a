package apiserver

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"
)

// pipes is a listener whose connections are in memory. Those that hang take what is written, and deliver nothing, as where packets are lost.
type pipes struct {
	mu     sync.Mutex
	open   []*pipe
	accept chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newPipes() *pipes { return &pipes{accept: make(chan net.Conn), closed: make(chan struct{})} }

// pipe is the server's end of a connection.
type pipe struct {
	net.Conn
	hangs chan struct{} // closed when it begins to hang
}

func (p *pipe) Write(b []byte) (int, error) {
	select {
	case <-p.hangs:
		return len(b), nil
	default:
		return p.Conn.Write(b)
	}
}

func (l *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-l.accept:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipes) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 6443} }

func (l *pipes) dial(context.Context, string, string) (net.Conn, error) {
	client, server := net.Pipe()
	p := &pipe{Conn: server, hangs: make(chan struct{})}
	l.mu.Lock()
	l.open = append(l.open, p)
	l.mu.Unlock()
	l.accept <- p
	return client, nil
}

// hang makes all connections so far hang.
func (l *pipes) hang() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.open {
		close(p.hangs)
	}
	l.open = nil
}

// ServeHTTP implements http.Handler.
func (c cluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer, err := c.RoundTrip(r)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer answer.Body.Close()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(answer.StatusCode)
	flush := w.(http.Flusher).Flush
	flush()
	for part := make([]byte, 4096); ; flush() {
		n, err := answer.Body.Read(part)
		if _, failed := w.Write(part[:n]); err != nil || failed != nil {
			return
		}
	}
}

// serve serves requests by HTTP/2 through the connections until the returned function is called.
func (l *pipes) serve(t *testing.T, h http.Handler) (client *Client, end func()) {
	server := httptest.NewUnstartedServer(h)
	_ = server.Listener.Close()
	server.Listener, server.EnableHTTP2 = l, true
	server.StartTLS()
	client, err := newClient(&rest.Config{Host: server.URL, QPS: -1, Dial: l.dial, TLSClientConfig: rest.TLSClientConfig{Insecure: true}})
	require.NoError(t, err)
	return client, func() {
		server.CloseClientConnections()
		server.Close()
	}
}

// TestUnreadAnswer: of an answer that nobody reads, not more is taken than unreadAnswer.
func TestUnreadAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const part = 4096
		var sent atomic.Int64
		l := newPipes()
		client, end := l.serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			for {
				if _, err := w.Write(make([]byte, part)); err != nil {
					return
				}
				sent.Add(part)
			}
		}))
		answer, err := client.core.Get().Resource(services).Stream(t.Context())
		require.NoError(t, err)
		synctest.Wait()
		assert.InDelta(t, unreadAnswer, sent.Load(), 16*part) // Both sides have buffers of their own.
		answer.Close()
		end()
	})
}

// TestHungConnection: a connection on which nothing comes any more, though nobody closes it, is given up for another one, through which changes
// come.
func TestHungConnection(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, l := newCluster(), newPipes()
		client, end := l.serve(t, c)
		told := &sees{t: t, services: map[string]int{}, came: map[string]time.Time{}}
		s, ended := New(Config{Client: client, NodeName: "n1", Log: slog.New(slog.DiscardHandler)}), make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			_ = s.Run(ctx, told)
			close(ended)
		}()
		time.Sleep(61 * time.Second) // in simulated time: bookmarks have just come
		l.hang()
		begun := time.Now()
		c.change("new")
		time.Sleep(time.Minute) // in simulated time, longer than all pauses
		told.check(c)
		_, at := told.told("new")
		if took := at.Sub(begun); took < answerWithin || took > askAfter+answerWithin+time.Second {
			t.Errorf("the change came after %v", took)
		}
		cancel()
		<-ended
		end()
	})
}
