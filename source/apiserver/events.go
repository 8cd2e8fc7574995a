package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
)

// The limit on events: a burst, then one event per interval. Trouble on a node must not overload the API server.
const (
	eventBurst        = 25
	eventEverySeconds = 30
)

const (
	// seriesGap is the time within which an equal event continues a series, as in the API's other clients.
	seriesGap = 6 * time.Minute
	// eventAttempts is the number of attempts to send an event that gets no answer.
	eventAttempts = 12
	// maxNote is the API's limit on an event's text, in bytes.
	maxNote = 1024
)

// Events writes Event objects about this node, which kubectl describe node shows. Equal events become a series of one object;
// events beyond the limit are dropped.
type Events struct {
	client     rest.Interface
	node       v1.ObjectReference
	controller string
	instance   string
	limit      flowcontrol.RateLimiter
	waiting    chan event
	retry      time.Duration // between attempts
	sent       map[event]*eventsv1.Event
	log        *slog.Logger
}

// event is what makes two events equal.
type event struct {
	kind, reason, action, note string
}

// NewEvents returns an Events that sends nothing before it runs. controller is the reporting controller, such as nodeproxy.
func NewEvents(client *Client, nodeName, controller string, log *slog.Logger) *Events {
	host, err := os.Hostname()
	if err != nil {
		host = nodeName
	}
	return &Events{
		client: client.events,
		// By an old convention of node components the UID is the name: kubectl finds a node's events by it.
		node:       v1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: nodeName, UID: types.UID(nodeName)},
		controller: controller,
		instance:   controller + "-" + host,
		limit:      flowcontrol.NewTokenBucketRateLimiter(1.0/eventEverySeconds, eventBurst),
		waiting:    make(chan event, eventBurst),
		retry:      10 * time.Second,
		sent:       map[event]*eventsv1.Event{},
		log:        log,
	}
}

// Run sends events until ctx ends, beginning with those recorded before it runs. Events that the API server rejects, or does not
// answer for two minutes, are dropped.
func (e *Events) Run(ctx context.Context) error {
	ctx = quietly(ctx, e.log)
	for {
		select {
		case <-ctx.Done():
			return nil
		case ev := <-e.waiting:
			e.deliver(ctx, ev, time.Now())
		}
	}
}

// Normal records an event of type Normal. reason is one word in CamelCase, such as Starting, and action the operation, such as
// StartNodeproxy. It does not wait for the API server.
func (e *Events) Normal(reason, action, note string, args ...any) {
	e.send(v1.EventTypeNormal, reason, action, note, args)
}

// Warning is like Normal, for an event that needs attention.
func (e *Events) Warning(reason, action, note string, args ...any) {
	e.send(v1.EventTypeWarning, reason, action, note, args)
}

func (e *Events) send(kind, reason, action, note string, args []any) {
	dropped := !e.limit.TryAccept()
	if !dropped {
		select {
		case e.waiting <- event{kind, reason, action, shortened(fmt.Sprintf(note, args...))}:
		default:
			dropped = true
		}
	}
	if dropped {
		e.log.Debug("event dropped: too many of late", "reason", reason)
	}
}

func shortened(note string) string {
	const mark = "…"
	if len(note) <= maxNote {
		return note
	}
	return strings.ToValidUTF8(note[:maxNote-len(mark)], "") + mark
}

// deliver sends an event that happened at that time: as the continuation of a series, or as a new object.
func (e *Events) deliver(ctx context.Context, ev event, at time.Time) {
	for other, obj := range e.sent {
		if last := lastTime(obj); at.Sub(last) > seriesGap {
			delete(e.sent, other)
		}
	}
	obj := e.object(ev, at)
	if before := e.sent[ev]; before != nil {
		obj = before.DeepCopy()
		if obj.Series == nil {
			obj.Series = &eventsv1.EventSeries{Count: 1}
		}
		obj.Series.Count++
		obj.Series.LastObservedTime = metav1.NewMicroTime(at)
	}
	for attempt := 1; ; attempt++ {
		err := e.request(ctx, obj)
		if err == nil {
			e.sent[ev] = obj
			return
		}
		if apierrors.IsNotFound(err) && obj.Series != nil { // Events live for an hour or so.
			obj = e.object(ev, at)
			continue
		}
		if ctx.Err() != nil || final(err) || attempt == eventAttempts {
			e.log.Warn("event not sent", "reason", ev.reason, "note", ev.note, "error", err)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(e.retry):
		}
	}
}

// final reports whether another attempt would fail in the same way, since the API server has understood the request and rejected
// it.
func final(err error) bool {
	var answer apierrors.APIStatus
	return errors.As(err, &answer) && answer.Status().Code < http.StatusInternalServerError &&
		answer.Status().Code != http.StatusTooManyRequests
}

func lastTime(obj *eventsv1.Event) time.Time {
	if obj.Series != nil {
		return obj.Series.LastObservedTime.Time
	}
	return obj.EventTime.Time
}

// object returns an event as a new object.
func (e *Events) object(ev event, at time.Time) *eventsv1.Event {
	return &eventsv1.Event{
		// Events about objects without a namespace are in this one.
		ObjectMeta:          metav1.ObjectMeta{Namespace: v1.NamespaceDefault, Name: fmt.Sprintf("%s.%x", e.node.Name, at.UnixNano())},
		EventTime:           metav1.NewMicroTime(at),
		ReportingController: e.controller,
		ReportingInstance:   e.instance,
		Action:              ev.action,
		Reason:              ev.reason,
		Regarding:           e.node,
		Note:                ev.note,
		Type:                ev.kind,
	}
}

// request creates an event or, if it has become a series, updates it.
func (e *Events) request(ctx context.Context, obj *eventsv1.Event) error {
	ctx, cancel := context.WithTimeoutCause(ctx, requestTimeout, errNoAnswer)
	defer cancel()
	if obj.Series == nil {
		err := e.client.Post().Namespace(obj.Namespace).Resource("events").Body(obj).Do(ctx).Error()
		if apierrors.IsAlreadyExists(err) { // An earlier attempt arrived; only its answer was lost.
			return nil
		}
		return because(ctx, err)
	}
	patch, err := json.Marshal(map[string]any{"series": obj.Series})
	if err != nil {
		return fmt.Errorf("event %s: %w", obj.Name, err)
	}
	return because(ctx, e.client.Patch(types.MergePatchType).Namespace(obj.Namespace).Resource("events").Name(obj.Name).Body(patch).
		Do(ctx).Error())
}
