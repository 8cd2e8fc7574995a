package apiserver

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/metrics"
)

// forwardList passes on a list that comes as a whole. In protobuf, each object is passed on as it arrives.
func (r *resource) forwardList(ctx context.Context, q request, receive func(message) error) error {
	asking, cancel := context.WithTimeoutCause(ctx, q.begin, noAnswer(q.begin))
	defer cancel()
	request, begun := r.get(q.ListOptions), time.Now()
	// client-go observes this of what it reads itself.
	defer func() { metrics.RequestLatency.Observe(ctx, http.MethodGet, *request.URL(), time.Since(begun)) }()
	answer, err := ask(asking, request)
	if err != nil {
		return err
	}
	defer answer.Close()
	from := bufio.NewReaderSize(answer, bufferSize)
	first, err := from.Peek(len(magic))
	if err != nil {
		return because(asking, incomplete(err))
	}
	if err := receive(message{}); err != nil {
		return err
	}
	read := r.readDecodedList
	if string(first) == magic {
		read = r.readList
	}
	version, err := read(from, func(e watchEvent) error { return receive(message{watchEvent: e}) })
	if err != nil {
		return because(asking, incomplete(err))
	}
	r.heard()
	if err := receive(message{listed: cmp.Or(version, "0")}); err != nil {
		return err
	}
	return io.EOF
}

// incomplete returns an error that does not say that an answer has ended as it should.
func incomplete(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// readDecodedList reads a list in JSON, and returns its version.
func (r *resource) readDecodedList(from *bufio.Reader, receive func(watchEvent) error) (version string, err error) {
	text, err := io.ReadAll(from)
	if err != nil {
		return "", err
	}
	list := r.newList()
	if got, _, err := codecs.UniversalDeserializer().Decode(text, nil, list); err != nil {
		return "", err
	} else if got != list {
		return "", fmt.Errorf("a %T came where a %T should", got, list)
	}
	err = meta.EachListItemWithAlloc(list, func(obj runtime.Object) error {
		e, err := eventOf(watch.Added, obj)
		if err != nil {
			return err
		}
		return receive(e)
	})
	if err != nil {
		return "", err
	}
	l, err := meta.ListAccessor(list)
	if err != nil {
		return "", err
	}
	return l.GetResourceVersion(), nil
}

// The numbers of fields of lists.
const (
	listMeta, listItems protowire.Number = 1, 2 // of all lists
	listMetaVersion     protowire.Number = 2    // metav1.ListMeta
)

// readList reads a list in protobuf to the end of the answer, and returns its version.
func (r *resource) readList(from *bufio.Reader, receive func(watchEvent) error) (version string, err error) {
	_, _ = from.Discard(len(magic))
	outer, got, want := fieldReader{from: from}, "", r.apiVersion+" "+r.kind+"List"
	for {
		number, size, err := outer.next()
		switch {
		case err != nil:
			return "", err
		case number == unknownRaw && got != want:
			return "", fmt.Errorf("%q came where %q should", got, want)
		case number == unknownRaw:
			list := &io.LimitedReader{R: from, N: size}
			version, err := readItems(&fieldReader{from: bufio.NewReaderSize(list, bufferSize)}, receive)
			if errors.Is(err, io.EOF) && list.N == 0 {
				_, err = io.Copy(io.Discard, from) // That is little, and with it a compressed answer has its checksum.
			}
			return version, err
		}
		value, err := outer.value(size)
		if err != nil {
			return "", err
		}
		if number == unknownType {
			apiVersion, kind := parseType(value)
			got = fmt.Sprintf("%s %s", apiVersion, kind)
		}
	}
}

// readItems reads the message of a list to its end, which is an error, and returns its version.
func readItems(list *fieldReader, receive func(watchEvent) error) (version string, err error) {
	for {
		number, size, err := list.next()
		if err != nil {
			return version, err
		}
		value, err := list.value(size)
		if err != nil {
			return "", incomplete(err)
		}
		switch number {
		case listItems:
			if err := receive(parseMeta(watch.Added, value)); err != nil {
				return "", err
			}
		case listMeta:
			for field, value := range fieldsOf(value) {
				if field == listMetaVersion {
					version = string(value)
				}
			}
		}
	}
}

// fieldReader reads a message all of whose fields are strings, bytes or messages.
type fieldReader struct {
	from *bufio.Reader
	last []byte
}

// next returns the number of the next field, and how long its value is; io.EOF where there is none.
func (f *fieldReader) next() (protowire.Number, int64, error) {
	tag, err := binary.ReadUvarint(f.from)
	if err != nil {
		return 0, 0, err
	}
	number, kind := protowire.DecodeTag(tag)
	if kind != protowire.BytesType {
		return 0, 0, fmt.Errorf("field %d of a list is of type %d", number, kind)
	}
	size, err := binary.ReadUvarint(f.from)
	if err != nil {
		return 0, 0, incomplete(err)
	}
	return number, int64(size), nil
}

// value returns the value of the field, until the next one is read.
func (f *fieldReader) value(size int64) ([]byte, error) {
	if size < 0 || size >= largestFrame {
		return nil, fmt.Errorf("a field of a list has %d bytes", size)
	}
	f.last = slices.Grow(f.last[:0], int(size))[:size]
	_, err := io.ReadFull(f.from, f.last)
	return f.last, err
}
