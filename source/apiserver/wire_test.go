package apiserver

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/util/framer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/metrics"

	"nodeproxy/source"
)

// decoded returns an event as it is read of JSON.
func decoded(kind watch.EventType, obj runtime.Object) watchEvent {
	e, err := eventOf(kind, obj)
	if err != nil {
		panic(err)
	}
	return e
}

// answeredBy returns a client whose requests are answered by a function.
func answeredBy(t testing.TB, answer roundTrip) *Client {
	c, err := newClient(&rest.Config{Host: "http://api.example", QPS: -1, Transport: answer})
	require.NoError(t, err)
	return c
}

// always answers each request with a body.
func always(body []byte) roundTrip {
	return func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader(body))}, nil
	}
}

// encode returns an object in protobuf, as the API server encodes it.
func encode(obj runtime.Object) ([]byte, error) {
	kinds, _, err := scheme.ObjectKinds(obj)
	if err != nil {
		return nil, err
	}
	obj.GetObjectKind().SetGroupVersionKind(kinds[0])
	var out bytes.Buffer
	err = protobuf.NewSerializer(scheme, scheme).Encode(obj, &out)
	return out.Bytes(), err
}

// field returns a field of a message.
func field(number protowire.Number, value string) string {
	return string(protowire.AppendString(protowire.AppendTag(nil, number, protowire.BytesType), value))
}

// frame returns an event of a watch in protobuf, as the API server encodes it.
func frame(kind watch.EventType, obj runtime.Object) ([]byte, error) {
	object, err := encode(obj)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	e := &metav1.WatchEvent{Type: string(kind), Object: runtime.RawExtension{Raw: object}}
	err = protobuf.NewRawSerializer(scheme, scheme).Encode(e, framer.NewLengthDelimitedFrameWriter(&out))
	return out.Bytes(), err
}

// inProtobuf answers as another does in JSON.
func inProtobuf(answer roundTrip) roundTrip {
	return func(r *http.Request) (*http.Response, error) {
		a, err := answer(r)
		if err != nil || a.StatusCode != http.StatusOK {
			return a, err
		}
		if r.URL.Query().Get("watch") == "" {
			text, err := io.ReadAll(a.Body)
			a.Body = io.NopCloser(io.MultiReader(bytes.NewReader(text), iotest.ErrReader(io.ErrUnexpectedEOF)))
			obj, _, undecodable := codecs.UniversalDeserializer().Decode(text, nil, nil)
			if err != nil || undecodable != nil {
				return a, nil
			}
			list, err := encode(obj)
			a.Header, a.Body = http.Header{"Content-Type": {runtime.ContentTypeProtobuf}}, io.NopCloser(bytes.NewReader(list))
			return a, err
		}
		out, in := io.Pipe()
		go func(from io.ReadCloser) {
			defer from.Close()
			_ = in.CloseWithError(transcode(in, from))
		}(a.Body)
		a.Header, a.Body = http.Header{"Content-Type": {runtime.ContentTypeProtobuf + ";stream=watch"}}, out
		return a, nil
	}
}

// transcode writes the events that come in JSON in protobuf, and what can't be read as what can't.
func transcode(to io.Writer, from io.Reader) error {
	for events := json.NewDecoder(from); ; {
		var e struct {
			Type   watch.EventType
			Object json.RawMessage
		}
		err := events.Decode(&e)
		if invalid := new(json.SyntaxError); errors.As(err, &invalid) {
			_, _ = to.Write([]byte{0, 0, 0, 1, 7})
		}
		if err != nil {
			return err
		}
		obj, _, err := codecs.UniversalDeserializer().Decode(e.Object, nil, nil)
		if err != nil {
			return err
		}
		f, err := frame(e.Type, obj)
		if err != nil {
			return err
		}
		if _, err := to.Write(f); err != nil {
			return err
		}
	}
}

// examples are objects of each resource.
var examples = map[string]runtime.Object{
	services: fullService(), endpointSlices: fullSlice(),
	nodes:        &v1.Node{ObjectMeta: metav1.ObjectMeta{GenerateName: "n", Name: "n1", ResourceVersion: "not-a-number", Generation: 3}},
	serviceCIDRs: &serviceCIDRList("10.96.0.0/16").Items[0],
}

// TestProtobuf: of an event in protobuf, the name and the version are read without the rest, and then all is as it was sent.
func TestProtobuf(t *testing.T) {
	t.Parallel()
	for _, r := range resources(Config{Client: &Client{}}) {
		for _, kind := range []watch.EventType{watch.Added, watch.Modified, watch.Deleted, watch.Bookmark} {
			f, err := frame(kind, examples[r.name].DeepCopyObject())
			require.NoError(t, err)
			from := newEventReader(r, bytes.NewReader(append(f, f...)))
			for range 2 {
				got, err := from.next()
				require.NoError(t, err)
				want := decoded(kind, examples[r.name])
				assert.Equal(t, kind != watch.Bookmark, got.object == nil, "only bookmarks are decoded")
				obj, err := r.decode(got)
				require.NoError(t, err)
				obj.GetObjectKind().SetGroupVersionKind(want.object.GetObjectKind().GroupVersionKind())
				assert.Equal(t, want.object, obj)
				assert.Equal(t, want.name, got.name)
				assert.Equal(t, want.version, got.version)
			}
			_, err = from.next()
			require.ErrorIs(t, err, io.EOF)
		}
	}
}

// TestEventErrors: how answers of watches end that are not as they should be.
func TestEventErrors(t *testing.T) {
	t.Parallel()
	r := resources(Config{Client: &Client{}})[0]
	service, err := frame(watch.Added, serviceAt(7, "a"))
	require.NoError(t, err)
	slice, err := frame(watch.Added, fullSlice())
	require.NoError(t, err)
	gone, err := frame(watch.Error, &metav1.Status{Code: http.StatusGone, Reason: metav1.StatusReasonExpired})
	require.NoError(t, err)
	short := magic + field(unknownType, field(typeVersion, "v1")+field(typeKind, "Service")) + field(unknownRaw, "\x0a\x09")
	short = field(eventType, "BOOKMARK") + field(eventObject, field(extensionRaw, short))
	undecodable := func(err error) bool { return apierrors.HasStatusCause(err, metav1.CauseType("ClientWatchDecoding")) }
	ended := func(err error) bool { return errors.Is(err, io.EOF) }
	for _, c := range []struct {
		what, text string
		want       func(error) bool
	}{
		{"nothing", "", ended},
		{"part of a length", string(service[:2]), ended},
		{"part of a frame", string(service[:20]), ended},
		{"part of JSON", `{"type": "ADDED"`, ended},
		{"too long a frame", "\x00" + string(service[1:]) + "\x01\x00\x00\x00", undecodable},
		{"an empty frame", "\x00\x00\x00\x00", undecodable},
		{"no message", "\x00\x00\x00\x02\xff\xff", undecodable},
		{"neither", "<html>", undecodable},
		{"another object", string(slice), apierrors.IsInternalError},
		{"another object in JSON", `{"type": "ADDED", "object": {"kind": "Node", "apiVersion": "v1"}}`, apierrors.IsInternalError},
		{"an unknown object", `{"type": "ADDED", "object": {"kind": "Pet", "apiVersion": "zoo/v1"}}`, undecodable},
		{"a bookmark that lacks its end", "\x00\x00\x00" + string(rune(len(short))) + short, undecodable},
		{"an error", string(gone), apierrors.IsResourceExpired},
	} {
		from := newEventReader(r, bytes.NewReader([]byte(c.text)))
		var err error
		for err == nil {
			_, err = from.next()
		}
		assert.Truef(t, c.want(err), "%s: %v", c.what, err)
	}
}

// TestKnownNotDecoded: of an object that is as it is known, a list decodes nothing but the name and the version.
func TestKnownNotDecoded(t *testing.T) {
	t.Parallel()
	r := resources(Config{Client: &Client{}})[1]
	s := newStore(r, func(*resource, source.Batch, bool) {})
	listed := func(version string, more ...byte) error {
		slice := fullSlice()
		slice.ResourceVersion = version
		object, err := encode(slice)
		require.NoError(t, err)
		s.begin()
		return s.list(parseMeta(watch.Added, append(r.message(object), more...)))
	}
	broken := []byte{2<<3 | 2, 1, 0xff} // an endpoint that is no message
	require.NoError(t, listed("7"))
	s.complete(7)
	require.NoError(t, listed("7", broken...))
	require.Error(t, listed("8", broken...))
}

// TestList: of a list that comes as a whole, each object is passed on, and it is said to be complete if all of it has come.
func TestList(t *testing.T) {
	t.Parallel()
	all := serviceList(41, fullService(), serviceAt(7, "a"), serviceAt(8, "b"))
	inJSON, err := json.Marshal(all)
	require.NoError(t, err)
	inMessage, err := encode(all)
	require.NoError(t, err)
	others, err := encode(&discovery.EndpointSliceList{})
	require.NoError(t, err)
	unknown := runtime.Unknown{}
	require.NoError(t, unknown.Unmarshal(inMessage[len(magic):]))
	read := func(text []byte) (names []string, listed string, err error) {
		r := resources(Config{Client: answeredBy(t, always(text))})[0]
		err = r.forward(t.Context(), request{plain: true, begin: time.Minute}, func(m message) error {
			if listed = m.listed; m.kind == "" {
				return nil
			}
			obj, err := r.decode(m.watchEvent)
			require.NoError(t, err)
			assert.Equal(t, m.name.Name, obj.(*v1.Service).Name)
			names = append(names, m.name.Name)
			return nil
		})
		return names, listed, err
	}
	for _, text := range [][]byte{inJSON, inMessage} {
		const contentType = 4 // bytes after the objects, which say nothing
		for n := range len(text) + 1 {
			names, listed, err := read(text[:n])
			if n >= len(text)-contentType && listed != "" {
				assert.Equal(t, []string{"web", "a", "b"}, names)
				assert.Equal(t, "41", listed)
				require.Equal(t, io.EOF, err)
				continue
			}
			require.Less(t, n, len(text))
			require.Empty(t, listed)
			require.Error(t, err)
			require.NotErrorIs(t, err, io.EOF)
		}
	}
	for _, text := range []string{
		string(others), `{"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1"}`, "<html>", magic + "\xff\xff\xff\xff\xff",
		magic + field(unknownRaw, string(unknown.Raw)), // It does not say of what.
	} {
		_, listed, err := read([]byte(text))
		require.Error(t, err, text)
		require.Empty(t, listed)
	}
}

// TestListChecked: a compressed list whose checksum is wrong does not count as complete, although all of it has come.
func TestListChecked(t *testing.T) {
	t.Parallel()
	list, err := encode(serviceList(41, serviceAt(7, "a")))
	require.NoError(t, err)
	r := resources(Config{Client: answeredBy(t, func(*http.Request) (*http.Response, error) {
		body := io.MultiReader(bytes.NewReader(list), iotest.ErrReader(gzip.ErrChecksum))
		return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(body)}, nil
	})})[0]
	listed := ""
	err = r.forward(t.Context(), request{plain: true, begin: time.Minute}, func(m message) error {
		listed += m.listed
		return nil
	})
	require.ErrorIs(t, err, gzip.ErrChecksum)
	require.Empty(t, listed)
}

// TestReached: what the API server says of a connection of its own is not taken for an error of the way to it.
func TestReached(t *testing.T) {
	t.Parallel()
	r := resources(Config{Client: answeredBy(t, func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusInternalServerError, Body: io.NopCloser(strings.NewReader("etcd: connection reset by peer"))}, nil
	})})[0]
	for _, plain := range []bool{false, true} {
		err := r.forward(t.Context(), request{plain: plain, begin: time.Minute}, func(message) error { return nil })
		assert.Truef(t, apierrors.IsInternalError(err), "%v", err)
	}
}

// latency records the hosts of requests that were observed.
type latency []string

func (l *latency) Observe(_ context.Context, verb string, u url.URL, _ time.Duration) {
	*l = append(*l, verb+" "+u.Host)
}

// TestListObserved: a list as a whole is among the requests whose durations are metrics. It is not parallel, as it sets what others use.
func TestListObserved(t *testing.T) {
	list, err := encode(serviceList(41))
	require.NoError(t, err)
	seen, before := &latency{}, metrics.RequestLatency
	metrics.RequestLatency = seen
	defer func() { metrics.RequestLatency = before }()
	r := resources(Config{Client: answeredBy(t, always(list))})[0]
	err = r.forward(t.Context(), request{plain: true, begin: time.Minute}, func(message) error { return nil })
	require.ErrorIs(t, err, io.EOF)
	assert.Equal(t, &latency{"GET api.example"}, seen)
}
