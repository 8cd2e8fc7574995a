package inspect

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"time"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// Handler answers a Client by what node returns; nil as long as there is nothing to tell.
func Handler(node func() *Node) http.Handler {
	mux := http.NewServeMux()
	handle := func(path string, answer func(ctx context.Context, n *Node, q url.Values) (any, error)) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
			if r.ProtoAtLeast(1, 1) { // So that clients can distinguish a long answer from none.
				w.WriteHeader(http.StatusProcessing)
			}
			n := node()
			if n == nil {
				http.Error(w, "nodeproxy has not begun to write rules; another proxy may run on this node", http.StatusServiceUnavailable)
				return
			}
			body, err := answer(r.Context(), n, r.URL.Query())
			var unknown *UnknownServiceError
			var pod *UnknownPodError
			var cant *TraceError
			switch {
			case errors.As(err, &cant):
				http.Error(w, err.Error(), http.StatusBadRequest)
			case errors.As(err, &unknown), errors.As(err, &pod):
				http.Error(w, err.Error(), http.StatusNotFound)
			case err != nil:
				http.Error(w, err.Error(), http.StatusInternalServerError)
			default:
				w.Header().Set("Content-Type", "application/json")
				_ = write(w, body) // The client finds out if it is cut off.
			}
		})
	}
	service := func(q url.Values) plan.Service {
		return plan.Service{Namespace: q.Get("namespace"), Name: q.Get("name")}
	}
	handle("/v1/services", func(ctx context.Context, n *Node, q url.Values) (any, error) {
		if q.Has("counters") {
			return n.countedServicePorts(ctx, service(q)), nil
		}
		return n.servicePorts(service(q)), nil
	})
	handle("/v1/desired", func(_ context.Context, n *Node, _ url.Values) (any, error) { return n.Desired() })
	handle("/v1/findings", func(_ context.Context, n *Node, _ url.Values) (any, error) { return n.AllFindings(), nil })
	handle("/v1/status", func(ctx context.Context, n *Node, _ url.Values) (any, error) { return n.Status(ctx), nil })
	handle("/v1/verify", func(ctx context.Context, n *Node, _ url.Values) (any, error) { return n.Verify(ctx), nil })
	handle("/v1/traffic", func(ctx context.Context, n *Node, _ url.Values) (any, error) { return n.Traffic(ctx) })
	handle("/v1/support", func(_ context.Context, n *Node, _ url.Values) (any, error) { return n.Support(), nil })
	handle("/v1/history", func(_ context.Context, n *Node, q url.Values) (any, error) {
		if q.Has("name") {
			return n.History.Of(service(q)), nil
		}
		return n.History.Syncs(), nil
	})
	handle("/v1/trace", func(_ context.Context, n *Node, q url.Values) (any, error) {
		return n.Trace(TraceQuery{q.Get("from"), q.Get("to"), plan.Protocol(q.Get("protocol")), q.Get("namespace")})
	})
	handle("/v1/explain", func(ctx context.Context, n *Node, q url.Values) (any, error) {
		e, err := n.Explain(service(q))
		if err == nil {
			n.Check(ctx, e) // For a few seconds at most.
		}
		return e, err
	})
	return mux
}

// write writes an answer as JSON. Rows are written one by one: a list of all Services has megabytes, which would make the heap grow.
func write(w io.Writer, body any) error {
	rows, is := body.(iter.Seq[ServicePort])
	if !is {
		return json.NewEncoder(w).Encode(body)
	}
	out, before := bufio.NewWriterSize(w, 32<<10), "["
	each := json.NewEncoder(out)
	var row ServicePort // one for all, as it escapes
	for row = range rows {
		_, _ = out.WriteString(before) // Each write after one that has failed does, too.
		if err := each.Encode(&row); err != nil {
			return err
		}
		before = ","
	}
	if before == "[" {
		_, _ = out.WriteString(before)
	}
	_, _ = out.WriteString("]\n")
	return out.Flush()
}

// Client asks the nodeproxy that runs on this node.
type Client struct {
	http http.Client
	// patience is how long it may take until there is a sign that the question is being answered, and longest how long until the
	// answer has been read.
	patience, longest time.Duration
	// Advise, unless it is nil, adds to each error what to do about it.
	Advise func(error) error
}

// NewClient returns a Client of the daemon whose socket has this path.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}
	return &Client{http: http.Client{Transport: &http.Transport{DialContext: dial}}, patience: 5 * time.Second, longest: time.Minute}
}

// SilentError is returned where a process accepts a question, and does not answer it.
type SilentError struct {
	After time.Duration
	// Began is set if it had begun to.
	Began bool
}

func (e *SilentError) Error() string {
	if e.Began {
		return fmt.Sprintf("has taken the question, but not answered it within %s", e.After)
	}
	return fmt.Sprintf("does not answer; there was no sign of it for %s", e.After)
}

// ServicePorts asks for what Node.ServicePorts returns.
func (c *Client) ServicePorts(ctx context.Context, of plan.Service) (out []ServicePort, err error) {
	return out, c.get(ctx, "services", url.Values{"namespace": {of.Namespace}, "name": {of.Name}}, &out)
}

// CountedServicePorts asks for the same with Counters, where there are any and they can be read in time.
func (c *Client) CountedServicePorts(ctx context.Context, of plan.Service) (out []ServicePort, err error) {
	return out, c.get(ctx, "services", url.Values{"namespace": {of.Namespace}, "name": {of.Name}, "counters": {"true"}}, &out)
}

// Findings asks for what Node.AllFindings returns.
func (c *Client) Findings(ctx context.Context) (out []Finding, err error) {
	return out, c.get(ctx, "findings", nil, &out)
}

// Status asks for what Node.Status returns.
func (c *Client) Status(ctx context.Context) (out *Status, err error) {
	return out, c.get(ctx, "status", nil, &out)
}

// Verify asks for what Node.Verify returns.
func (c *Client) Verify(ctx context.Context) (out *source.Verification, err error) {
	return out, c.get(ctx, "verify", nil, &out)
}

// Support asks for what Node.Support returns.
func (c *Client) Support(ctx context.Context) (out map[string]string, err error) {
	return out, c.get(ctx, "support", nil, &out)
}

// History asks for the last syncs, of one Service if its name is not empty.
func (c *Client) History(ctx context.Context, svc plan.Service) (out []Sync, err error) {
	q := url.Values{}
	if svc.Name != "" {
		q = url.Values{"namespace": {svc.Namespace}, "name": {svc.Name}}
	}
	return out, c.get(ctx, "history", q, &out)
}

// Explain asks for what Node.Explain returns.
func (c *Client) Explain(ctx context.Context, svc plan.Service) (out *Explanation, err error) {
	return out, c.get(ctx, "explain", url.Values{"namespace": {svc.Namespace}, "name": {svc.Name}}, &out)
}

// Trace asks for what Node.Trace returns.
func (c *Client) Trace(ctx context.Context, q TraceQuery) (out *Trace, err error) {
	return out, c.get(ctx, "trace", url.Values{"from": {q.From}, "to": {q.To}, "protocol": {string(q.Protocol)}, "namespace": {q.Namespace}}, &out)
}

func (c *Client) get(ctx context.Context, what string, q url.Values, into any) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	sign := time.AfterFunc(c.patience, func() { cancel(&SilentError{After: c.patience}) })
	defer sign.Stop()
	end := time.AfterFunc(c.longest, func() { cancel(&SilentError{After: c.longest, Began: true}) })
	defer end.Stop()
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		Got1xxResponse:       func(int, textproto.MIMEHeader) error { sign.Stop(); return nil },
		GotFirstResponseByte: func() { sign.Stop() },
	})
	err := c.ask(ctx, what, q, into)
	if silent := (*SilentError)(nil); err != nil && errors.As(context.Cause(ctx), &silent) {
		err = silent
	}
	if err != nil && c.Advise != nil {
		err = c.Advise(err)
	}
	return err
}

func (c *Client) ask(ctx context.Context, what string, q url.Values, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://nodeproxy/v1/"+what+"?"+q.Encode(), nil)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if inner := (*url.Error)(nil); errors.As(err, &inner) {
			err = inner.Err // Without the address, which means nothing to anybody.
		}
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return &AnswerError{resp.StatusCode, string(text)}
	}
	if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
		return fmt.Errorf("reading the answer: %w", err)
	}
	return nil
}

// AnswerError is the answer of a daemon that can't give the one that was asked for.
type AnswerError struct {
	Status int
	Text   string
}

// BadRequest reports whether the question can't be answered as it is.
func (e *AnswerError) BadRequest() bool { return e.Status == http.StatusBadRequest }

func (e *AnswerError) Error() string { return strings.TrimSpace(e.Text) }
