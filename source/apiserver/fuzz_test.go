package apiserver

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/watch"
)

// FuzzEvents: whatever a watch in protobuf brings, nothing panics, and an object that can be decoded has the name and the version that were
// read without the rest.
func FuzzEvents(f *testing.F) {
	all := resources(Config{Client: &Client{}})
	for i, r := range all {
		for _, kind := range []watch.EventType{watch.Added, watch.Deleted, watch.Bookmark} {
			text, err := frame(kind, examples[r.name].DeepCopyObject())
			require.NoError(f, err)
			f.Add(uint(i), text)
		}
	}
	f.Fuzz(func(t *testing.T, i uint, text []byte) {
		r := all[i%uint(len(all))]
		for from := newEventReader(r, bytes.NewReader(text)); ; {
			e, err := from.next()
			if err != nil {
				require.True(t, errors.Is(err, io.EOF) || reached(err), err)
				return
			}
			obj, err := r.decode(e)
			if err != nil {
				continue
			}
			o, err := meta.Accessor(obj)
			require.NoError(t, err)
			require.Equal(t, []string{o.GetNamespace(), o.GetName(), o.GetResourceVersion()}, []string{e.name.Namespace, e.name.Name, e.version})
		}
	})
}
