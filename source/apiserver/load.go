package apiserver

import (
	"cmp"
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"nodeproxy/source"
)

// Load lists everything that a Source would watch, once: it opens no watch, and writes no events. What it can do without is reported:
// a Node of this name, and an optional resource that may not be listed. Any other failure is an error, and so is an API server that
// does not deliver everything within a minute.
func Load(ctx context.Context, cfg Config) (source.Batch, error) {
	limit := cmp.Or(cfg.loadTimeout, requestTimeout)
	ctx, cancel := context.WithTimeoutCause(ctx, limit,
		fmt.Errorf("the API server %s has not delivered everything within %s", cfg.Client.server.Redacted(), limit))
	defer cancel()
	var out source.Batch
	for _, r := range resources(cfg) {
		b, err := r.load(ctx)
		switch {
		case r.optional && apierrors.IsNotFound(err):
		case r.optional && apierrors.IsForbidden(err):
			cfg.report(source.Finding{
				Severity: source.Problem, Object: r.name, Detail: fmt.Sprintf("they may not be listed: %v", err),
				Effect: "Services are proxied without them",
			})
		case err != nil:
			return source.Batch{}, fmt.Errorf("listing %s: %w", r.name, err)
		}
		out.Merge(b)
	}
	out.NodeMissing = out.Nodes[cfg.NodeName] == nil
	out.Synced = true
	return out, nil
}

// load lists the objects of a resource, with all their fields: they are not kept for long.
func (r *resource) load(ctx context.Context) (out source.Batch, err error) {
	list, err := r.list(ctx, metav1.ListOptions{})
	if err != nil {
		return out, cmp.Or(context.Cause(ctx), err)
	}
	err = meta.EachListItem(list, func(obj runtime.Object) error {
		name, _ := identify(obj)
		r.put(&out, name, obj)
		return nil
	})
	return out, err
}
