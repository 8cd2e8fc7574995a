package apiserver

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"

	"nodeproxy/source"
)

// typicalSlice returns an EndpointSlice of two Pods, with all that the API server and the controllers write into one.
func typicalSlice(i int) *discovery.EndpointSlice {
	const uid = types.UID("0b5f1d30-3f26-4a05-9a0e-9d9a1b0f1c2d")
	service := fmt.Sprintf("service-%05d", i)
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "bench", Name: service + "-abcde", GenerateName: service + "-", ResourceVersion: fmt.Sprint(1000000 + i), UID: uid,
			CreationTimestamp: metav1.Unix(1e9, 0), Generation: 3,
			Labels:          map[string]string{discovery.LabelServiceName: service, discovery.LabelManagedBy: "endpointslice-controller.k8s.io"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: service, UID: uid}},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kube-controller-manager", Operation: "Update", APIVersion: "discovery.k8s.io/v1",
				FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(strings.Repeat("f:endpoints:{},", 25))}},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: ptr.To("http"), Protocol: ptr.To(v1.ProtocolTCP), Port: ptr.To(int32(8080))}},
	}
	for j := range 2 {
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", j, i/256, i%256)},
			Conditions: discovery.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
			NodeName:   ptr.To("node-1"), TargetRef: &v1.ObjectReference{Kind: "Pod", Namespace: "bench", Name: fmt.Sprint("pod-", i), UID: uid},
		})
	}
	return s
}

// typicalAnswers returns 10,000 EndpointSlices as a list and as the events of a stream, in protobuf.
func typicalAnswers(b *testing.B) (whole, events []byte) {
	const version = "2000000"
	all := discovery.EndpointSliceList{ListMeta: metav1.ListMeta{ResourceVersion: version}}
	send := func(kind watch.EventType, slice *discovery.EndpointSlice) {
		f, err := frame(kind, slice)
		require.NoError(b, err)
		events = append(events, f...)
	}
	for i := range 10000 {
		all.Items = append(all.Items, *typicalSlice(i))
		send(watch.Added, &all.Items[i])
	}
	send(watch.Bookmark, &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{ResourceVersion: version,
		Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}})
	whole, err := encode(&all)
	require.NoError(b, err)
	return whole, events
}

// BenchmarkRelist lists 10,000 EndpointSlices, in protobuf: for the first time, and again, when all of them are as they are known.
func BenchmarkRelist(b *testing.B) {
	list, events := typicalAnswers(b)
	for _, c := range []struct {
		name         string
		answer       []byte
		plain, again bool
	}{
		{"stream/first", events, false, false}, {"stream/again", events, false, true},
		{"whole/first", list, true, false}, {"whole/again", list, true, true},
	} {
		b.Run(c.name, func(b *testing.B) {
			r := resources(Config{Client: answeredBy(b, always(c.answer)), Log: slog.New(slog.DiscardHandler), Silence: DefaultSilence})[1]
			s := newStore(r, func(*resource, source.Batch, bool) {})
			if c.again {
				listOnce(b, s, c.plain)
			}
			b.ReportAllocs()
			b.ResetTimer()
			before := processorTime()
			for b.Loop() {
				if !c.again {
					s = newStore(r, s.deliver)
				}
				listOnce(b, s, c.plain)
			}
			b.ReportMetric(float64((processorTime()-before).Microseconds())/1000/float64(b.N), "cpu-ms/op")
		})
	}
}

func listOnce(b *testing.B, s *store, plain bool) {
	errListed := errors.New("listed")
	q := request{begin: time.Minute, plain: plain}
	if !plain {
		q.SendInitialEvents = ptr.To(true)
	}
	s.begin()
	err := s.resource.forward(b.Context(), q, func(m message) error {
		switch {
		case m.listed != "":
			s.complete(number(m.listed))
			return errListed
		case m.kind == "":
			return nil
		}
		return s.list(m.watchEvent)
	})
	require.ErrorIs(b, err, errListed)
}

// processorTime returns how much of that this process has used.
func processorTime() time.Duration {
	var usage syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// BenchmarkVerify compares 10,000 EndpointSlices with a list in protobuf of which all are as they are known.
func BenchmarkVerify(b *testing.B) {
	_, events := typicalAnswers(b)
	r := resources(Config{Client: answeredBy(b, always(events)), Log: slog.New(slog.DiscardHandler), Silence: DefaultSilence})[1]
	f := newFollower(r, newStore(r, func(*resource, source.Batch, bool) {}))
	listOnce(b, f.store, false)
	f.version, f.whole = "2000000", true
	b.ReportAllocs()
	b.SetBytes(int64(len(events)))
	before := processorTime()
	for b.Loop() {
		n, found, err := f.verify(b.Context(), r)
		if n != 10000 || len(found) > 0 || err != nil {
			b.Fatal(n, found, err)
		}
	}
	b.ReportMetric(float64((processorTime()-before).Microseconds())/1000/float64(b.N), "cpu-ms/op")
}
