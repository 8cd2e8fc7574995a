package apiserver

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"reflect"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	restwatch "k8s.io/client-go/rest/watch"
)

// watchEvent is what the API server says of an object: that there is one, or no longer, as of a version.
type watchEvent struct {
	kind    watch.EventType
	name    types.NamespacedName
	version string
	// object is decoded, or encoded is the object as a message of protobuf, until the next event is read.
	object  runtime.Object
	encoded []byte
}

// eventOf returns an event with a decoded object.
func eventOf(kind watch.EventType, obj runtime.Object) (watchEvent, error) {
	o, err := meta.Accessor(obj)
	if err != nil {
		return watchEvent{}, fmt.Errorf("event %s: %w", kind, err)
	}
	name := types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
	return watchEvent{kind: kind, name: name, version: o.GetResourceVersion(), object: obj}, nil
}

// decode returns the object of an event.
func (r *resource) decode(e watchEvent) (runtime.Object, error) {
	if e.object != nil {
		return e.object, nil
	}
	obj := reflect.New(reflect.TypeOf(r.example).Elem()).Interface().(runtime.Object)
	if err := obj.(interface{ Unmarshal([]byte) error }).Unmarshal(e.encoded); err != nil {
		return nil, unreadable(err)
	}
	return obj, nil
}

// eventReader reads the events of a watch. It does what client-go's StreamWatcher does, with two differences. It has no goroutine. And of an
// object in protobuf it decodes only the name and the version, which say whether the rest is known: when everything is listed again, nearly
// all of it is.
type eventReader struct {
	resource *resource
	from     *bufio.Reader
	read     func() (watchEvent, error) // the next event, as the answer is encoded
	frame    []byte                     // the one that was read last
}

func newEventReader(r *resource, from io.Reader) *eventReader {
	e := &eventReader{resource: r, from: bufio.NewReaderSize(from, bufferSize)}
	e.read = e.readFirst
	return e
}

// next waits for the next event. It returns io.EOF at the end of the answer, also where that is the end of the connection.
func (e *eventReader) next() (watchEvent, error) {
	out, err := e.read()
	switch {
	case err == nil, reached(err):
		return out, err
	case errors.Is(err, io.EOF), utilnet.IsProbableEOF(err), utilnet.IsTimeout(err):
		return out, io.EOF
	}
	return out, unreadable(err)
}

// unreadable makes an error like that of client-go for an answer in which something can't be read.
func unreadable(err error) error {
	report := apierrors.NewClientErrorReporter(http.StatusInternalServerError, http.MethodGet, "ClientWatchDecoding")
	return apierrors.FromObject(report.AsObject(fmt.Errorf("unable to decode an event from the watch stream: %w", err)))
}

// readFirst reads the first event, and sees how the answer is encoded: protobuf begins with the length of a frame, whose first byte is 0.
func (e *eventReader) readFirst() (watchEvent, error) {
	first, err := e.from.Peek(1)
	if err != nil {
		return watchEvent{}, err
	}
	e.read = e.readProtobuf
	if first[0] != 0 {
		info, _ := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), runtime.ContentTypeJSON)
		frames := info.StreamSerializer.Framer.NewFrameReader(io.NopCloser(e.from))
		from := restwatch.NewDecoder(streaming.NewDecoder(frames, info.StreamSerializer.Serializer), codecs.UniversalDeserializer())
		e.read = func() (watchEvent, error) { return e.readDecoded(from) }
	}
	return e.read()
}

func (e *eventReader) readDecoded(from *restwatch.Decoder) (watchEvent, error) {
	kind, obj, err := from.Decode()
	if err != nil {
		return watchEvent{}, err
	}
	return e.decoded(kind, obj)
}

// bufferSize is how much of an answer is read at a time.
const bufferSize = 16 << 10

// largestFrame is client-go's limit, too; that of etcd is a tenth of it.
const largestFrame = 16 << 20

func (e *eventReader) readProtobuf() (watchEvent, error) {
	length, err := e.from.Peek(4)
	if err != nil {
		return watchEvent{}, err
	}
	size := int(binary.BigEndian.Uint32(length))
	if size >= largestFrame {
		return watchEvent{}, streaming.ErrObjectTooLarge
	}
	_, _ = e.from.Discard(len(length))
	e.frame = slices.Grow(e.frame[:0], size)[:size]
	if _, err := io.ReadFull(e.from, e.frame); err != nil {
		return watchEvent{}, err
	}
	return e.parse(e.frame)
}

// decoded returns an event with an object that has been decoded, or what it says as an error.
func (e *eventReader) decoded(kind watch.EventType, obj runtime.Object) (watchEvent, error) {
	if kind == watch.Error {
		return watchEvent{}, apierrors.FromObject(obj)
	}
	if got, want := reflect.TypeOf(obj), reflect.TypeOf(e.resource.example); got != want {
		return watchEvent{}, apierrors.NewInternalError(fmt.Errorf("an event of a %v came where one of a %v should", got, want))
	}
	return eventOf(kind, obj)
}

// The numbers of fields of messages.
const (
	eventType, eventObject                   protowire.Number = 1, 2 // metav1.WatchEvent
	extensionRaw                             protowire.Number = 1    // runtime.RawExtension
	unknownType, unknownRaw, unknownEncoding protowire.Number = 1, 2, 3
	typeVersion, typeKind                    protowire.Number = 1, 2 // runtime.TypeMeta
	objectMeta                               protowire.Number = 1    // of all objects
	metaName, metaNamespace, metaVersion     protowire.Number = 1, 3, 6
)

// magic is at the beginning of each object in protobuf that says what kind it is of: a runtime.Unknown.
const magic = "k8s\x00"

// fieldsOf iterates over the fields of a message that are strings, bytes or messages. It ends where the message is not valid, which shows when
// the whole is decoded.
func fieldsOf(message []byte) iter.Seq2[protowire.Number, []byte] {
	return func(yield func(protowire.Number, []byte) bool) {
		for len(message) > 0 {
			number, kind, tag := protowire.ConsumeTag(message)
			if tag < 0 {
				return
			}
			size := protowire.ConsumeFieldValue(number, kind, message[tag:])
			if size < 0 {
				return
			}
			if kind == protowire.BytesType {
				if value, _ := protowire.ConsumeBytes(message[tag:]); !yield(number, value) {
					return
				}
			}
			message = message[tag+size:]
		}
	}
}

// parse reads an event in protobuf.
func (e *eventReader) parse(frame []byte) (watchEvent, error) {
	var kind watch.EventType
	var object []byte
	for field, value := range fieldsOf(frame) {
		switch field {
		case eventType:
			kind = watch.EventType(value)
		case eventObject:
			for field, value := range fieldsOf(value) {
				if field == extensionRaw {
					object = value
				}
			}
		}
	}
	switch kind {
	case watch.Added, watch.Modified, watch.Deleted:
		if encoded := e.resource.message(object); encoded != nil {
			return parseMeta(kind, encoded), nil
		}
	case watch.Error, watch.Bookmark:
	default:
		return watchEvent{}, fmt.Errorf("got invalid watch event type: %v", kind)
	}
	obj, _, err := codecs.UniversalDeserializer().Decode(object, nil, nil)
	if err != nil {
		return watchEvent{}, unreadable(err) // An io.ErrUnexpectedEOF is not the end of the answer, but that of the object.
	}
	return e.decoded(kind, obj)
}

// message returns the message of an object of this resource, without what says so; nil if it is another, or not as usual.
func (r *resource) message(object []byte) (message []byte) {
	unknown, ok := bytes.CutPrefix(object, []byte(magic))
	if !ok {
		return nil
	}
	var apiVersion, kind []byte
	for field, value := range fieldsOf(unknown) {
		switch field {
		case unknownType:
			apiVersion, kind = parseType(value)
		case unknownRaw:
			message = value
		case unknownEncoding:
			if len(value) > 0 {
				return nil
			}
		}
	}
	if string(apiVersion) != r.apiVersion || string(kind) != r.kind {
		return nil
	}
	return message
}

// parseType reads a runtime.TypeMeta.
func parseType(message []byte) (apiVersion, kind []byte) {
	for field, value := range fieldsOf(message) {
		switch field {
		case typeVersion:
			apiVersion = value
		case typeKind:
			kind = value
		}
	}
	return apiVersion, kind
}

// parseMeta returns an event with an object of which only the name and the version have been decoded.
func parseMeta(kind watch.EventType, object []byte) watchEvent {
	out := watchEvent{kind: kind, encoded: object}
	for field, value := range fieldsOf(object) {
		if field != objectMeta {
			continue
		}
		for field, value := range fieldsOf(value) {
			switch field {
			case metaName:
				out.name.Name = string(value)
			case metaNamespace:
				out.name.Namespace = string(value)
			case metaVersion:
				out.version = string(value)
			}
		}
	}
	return out
}
