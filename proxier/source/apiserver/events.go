package apiserver

import (
	"context"
	"fmt"
	"log/slog"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/flowcontrol"
)

// The limit on events: so many at once, then one in so many seconds. A node in trouble must not be one for the API server.
const (
	eventBurst        = 25
	eventEverySeconds = 30
)

// Events tells the cluster about this node through Event objects, where kubectl describe node shows them. Equal events
// become a series of one object; more than the limit are dropped.
type Events struct {
	node        *v1.ObjectReference
	broadcaster events.EventBroadcaster
	recorder    events.EventRecorder
	limit       flowcontrol.RateLimiter
	waiting     chan event
	log         *slog.Logger
}

type event struct {
	kind, reason, action, note string
	args                       []any
}

// NewEvents returns an Events that sends nothing before it runs. controller names who tells, such as nodeproxy.
func NewEvents(client kubernetes.Interface, nodeName, controller string, log *slog.Logger) *Events {
	b := events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()})
	return &Events{
		// The UID is the name by an old agreement of all that run on nodes: it is by it that kubectl finds a node's events.
		node:        &v1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: nodeName, UID: types.UID(nodeName)},
		broadcaster: b,
		recorder:    b.NewRecorder(scheme.Scheme, controller),
		limit:       flowcontrol.NewTokenBucketRateLimiter(1.0/eventEverySeconds, eventBurst),
		waiting:     make(chan event, eventBurst),
		log:         log,
	}
}

// Run sends events until ctx ends, those first that came before it.
func (e *Events) Run(ctx context.Context) error {
	defer e.broadcaster.Shutdown()
	if err := e.broadcaster.StartRecordingToSinkWithContext(ctx); err != nil {
		return fmt.Errorf("events of node %s: %w", e.node.Name, err)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case ev := <-e.waiting:
			e.recorder.Eventf(e.node, nil, ev.kind, ev.reason, ev.action, ev.note, ev.args...)
		}
	}
}

// Normal notes something that is as it should be. reason is one word in CamelCase, such as Starting, and action what was
// being done, such as StartNodeproxy. It does not wait for the API server.
func (e *Events) Normal(reason, action, note string, args ...any) {
	e.send(v1.EventTypeNormal, reason, action, note, args)
}

// Warning is Normal for something that somebody should look into.
func (e *Events) Warning(reason, action, note string, args ...any) {
	e.send(v1.EventTypeWarning, reason, action, note, args)
}

func (e *Events) send(kind, reason, action, note string, args []any) {
	dropped := !e.limit.TryAccept()
	if !dropped {
		select {
		case e.waiting <- event{kind, reason, action, note, args}:
		default:
			dropped = true
		}
	}
	if dropped {
		e.log.Debug("event dropped: too many of late", "reason", reason)
	}
}
