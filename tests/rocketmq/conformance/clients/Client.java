import static java.nio.charset.StandardCharsets.UTF_8;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicLong;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.ProducerBuilder;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;
import org.apache.rocketmq.shaded.com.google.gson.Gson;
import org.apache.rocketmq.shaded.com.google.gson.GsonBuilder;
import org.apache.rocketmq.shaded.com.google.gson.JsonElement;
import org.apache.rocketmq.shaded.com.google.gson.JsonObject;
import org.apache.rocketmq.shaded.com.google.gson.JsonParser;

/** The official Java client behind JSON lines; the protocol is described in client.py. */
public final class Client {
    static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    static final Gson GSON = new GsonBuilder().serializeNulls().create();
    static final AtomicLong NUMBERS = new AtomicLong();
    static final Map<String, Object> THINGS = new ConcurrentHashMap<>();
    static final Map<Long, MessageView> MESSAGES = new ConcurrentHashMap<>();
    static final Map<Long, CompletableFuture<String>> CALLS = new ConcurrentHashMap<>();
    static final Pattern CODE = Pattern.compile("response-code=(\\d+)");

    static synchronized void say(Map<String, Object> record) {
        System.out.print(GSON.toJson(record) + "\n");
        System.out.flush();
    }

    static Map<String, Object> view(MessageView message) {
        long ref = NUMBERS.incrementAndGet();
        MESSAGES.put(ref, message);
        ByteBuffer body = message.getBody();
        byte[] bytes = new byte[body.remaining()];
        body.get(bytes);
        Map<String, Object> view = new HashMap<>();
        view.put("ref", ref);
        view.put("id", message.getMessageId().toString());
        view.put("topic", message.getTopic());
        view.put("tag", message.getTag().orElse(null));
        view.put("body", Base64.getEncoder().encodeToString(bytes));
        view.put("keys", new TreeSet<>(message.getKeys()));
        view.put("props", message.getProperties());
        view.put("group", message.getMessageGroup().orElse(null));
        view.put("attempt", message.getDeliveryAttempt());
        view.put("at", message.getDeliveryTimestamp().orElse(null));
        return view;
    }

    static String ask(String name, String what, MessageView message) {
        long number = NUMBERS.incrementAndGet();
        CompletableFuture<String> answer = new CompletableFuture<>();
        CALLS.put(number, answer);
        say(Map.of("call", number, "on", name, "what", what, "message", view(message)));
        String text = answer.join();
        if (text.equals("RAISE")) {
            throw new IllegalStateException("as asked");
        }
        return text;
    }

    static String text(JsonObject r, String name) {
        return r.has(name) && !r.get(name).isJsonNull() ? r.get(name).getAsString() : null;
    }

    static int number(JsonObject r, String name, int otherwise) {
        return r.has(name) ? r.get(name).getAsInt() : otherwise;
    }

    static ClientConfiguration configuration(JsonObject r) {
        ClientConfigurationBuilder builder = ClientConfiguration.newBuilder().setEndpoints(text(r, "endpoints"))
            .enableSsl(r.has("tls") && r.get("tls").getAsBoolean())
            .setRequestTimeout(Duration.ofSeconds(number(r, "timeout", 10)));
        String key = text(r, "ak");
        if (key != null && !key.isEmpty()) {
            builder.setCredentialProvider(new StaticSessionCredentialsProvider(key, text(r, "sk")));
        }
        return builder.build();
    }

    static Map<String, FilterExpression> filters(JsonObject r) {
        Map<String, FilterExpression> filters = new HashMap<>();
        r.getAsJsonObject("subs").entrySet().forEach(each -> {
            String text = each.getValue().getAsString();
            filters.put(each.getKey(), text.startsWith("SQL:")
                ? new FilterExpression(text.substring(4), FilterExpressionType.SQL92) : new FilterExpression(text));
        });
        return filters;
    }

    static Message message(JsonObject r) {
        byte[] body = r.has("size") ? new byte[r.get("size").getAsInt()] : text(r, "body").getBytes(UTF_8);
        MessageBuilder builder = PROVIDER.newMessageBuilder().setTopic(text(r, "topic")).setBody(body);
        if (text(r, "tag") != null) {
            builder.setTag(text(r, "tag"));
        }
        if (r.has("keys")) {
            builder.setKeys(GSON.fromJson(r.get("keys"), String[].class));
        }
        if (r.has("props")) {
            r.getAsJsonObject("props").entrySet().forEach(
                each -> builder.addProperty(each.getKey(), each.getValue().getAsString()));
        }
        if (text(r, "group") != null) {
            builder.setMessageGroup(text(r, "group"));
        }
        if (r.has("at")) {
            builder.setDeliveryTimestamp(r.get("at").getAsLong() * 1000);
        }
        return builder.build();
    }

    static Object producer(JsonObject r) throws Exception {
        ProducerBuilder builder = PROVIDER.newProducerBuilder().setClientConfiguration(configuration(r));
        String[] topics = GSON.fromJson(r.get("topics"), String[].class);
        if (topics.length > 0) {
            builder.setTopics(topics);
        }
        if (r.has("check") && r.get("check").getAsBoolean()) {
            String name = text(r, "as");
            builder.setTransactionChecker(view -> TransactionResolution.valueOf(ask(name, "check", view)));
        }
        return builder.build();
    }

    static Object simple(JsonObject r) throws Exception {
        return PROVIDER.newSimpleConsumerBuilder().setClientConfiguration(configuration(r))
            .setConsumerGroup(text(r, "group")).setAwaitDuration(Duration.ofSeconds(number(r, "await", 5)))
            .setSubscriptionExpressions(filters(r)).build();
    }

    static Object push(JsonObject r) throws Exception {
        String name = text(r, "as");
        return PROVIDER.newPushConsumerBuilder().setClientConfiguration(configuration(r))
            .setConsumerGroup(text(r, "group")).setSubscriptionExpressions(filters(r))
            .setMessageListener(view -> ConsumeResult.valueOf(ask(name, "message", view))).build();
    }

    static Object send(JsonObject r, Producer producer) throws Exception {
        Transaction transaction = r.has("tx") ? (Transaction) THINGS.get(text(r, "tx")) : null;
        SendReceipt receipt = transaction == null ? producer.send(message(r)) : producer.send(message(r), transaction);
        String recall = receipt.getRecallHandle();
        return Map.of("id", receipt.getMessageId().toString(), "tx", transaction == null ? "" : "hidden",
            "recall", recall == null ? "" : recall);
    }

    /** Carries out a request on a thing that is there. */
    static Object act(JsonObject r, String op, Object on) throws Exception {
        MessageView message = r.has("ref") ? MESSAGES.get(r.get("ref").getAsLong()) : null;
        switch (op) {
            case "send": return send(r, (Producer) on);
            case "begin": THINGS.put(text(r, "as"), ((Producer) on).beginTransaction()); return null;
            case "commit": ((Transaction) on).commit(); return null;
            case "rollback": ((Transaction) on).rollback(); return null;
            case "recall":
                return Map.of("id", ((Producer) on).recallMessage(text(r, "topic"), text(r, "handle")).getMessageId()
                    .toString());
            case "receive":
                List<MessageView> found = ((SimpleConsumer) on).receive(number(r, "max", 16),
                    Duration.ofSeconds(number(r, "invisible", 30)));
                return found.stream().map(Client::view).toArray();
            case "ack": ((SimpleConsumer) on).ack(message); return null;
            case "change":
                ((SimpleConsumer) on).changeInvisibleDuration(message, Duration.ofSeconds(number(r, "seconds", 0)));
                return Map.of("handle", "hidden");
            case "subscribe":
                for (Map.Entry<String, FilterExpression> each : filters(r).entrySet()) {
                    ((PushConsumer) on).subscribe(each.getKey(), each.getValue());
                }
                return null;
            case "unsubscribe": ((PushConsumer) on).unsubscribe(text(r, "topic")); return null;
            case "close": ((AutoCloseable) on).close(); return null;
            default: throw new IllegalArgumentException(op);
        }
    }

    static Object result(JsonObject r) throws Exception {
        String op = text(r, "op");
        Object made;
        switch (op) {
            case "producer": made = producer(r); break;
            case "simple": made = simple(r); break;
            case "push": made = push(r); break;
            default: return act(r, op, THINGS.get(text(r, "on")));
        }
        THINGS.put(text(r, "as"), made);
        return Map.of("client_id", "hidden");
    }

    /** The class of the outermost error, and the texts of all behind it. */
    static Map<String, Object> error(Throwable thrown) {
        StringBuilder text = new StringBuilder();
        for (Throwable at = thrown; at != null && text.length() < 600; at = at.getCause()) {
            String message = String.valueOf(at.getMessage());
            if (text.indexOf(message) < 0) {
                text.append(text.length() == 0 ? "" : " < ").append(at.getClass().getSimpleName()).append(": ")
                    .append(message);
            }
        }
        Map<String, Object> error = new HashMap<>();
        Matcher code = CODE.matcher(text);
        error.put("type", thrown.getClass().getSimpleName());
        error.put("code", code.find() ? Integer.valueOf(code.group(1)) : null);
        error.put("text", text.substring(0, Math.min(600, text.length())));
        return error;
    }

    static void serve(JsonObject r) {
        Map<String, Object> record = new HashMap<>();
        record.put("n", r.get("n").getAsLong());
        try {
            record.put("ok", result(r));
        } catch (Throwable thrown) {
            record.put("error", error(thrown));
        }
        say(record);
    }

    public static void main(String[] arguments) throws Exception {
        ExecutorService pool = Executors.newCachedThreadPool();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonObject r = JsonParser.parseString(line).getAsJsonObject();
            JsonElement call = r.get("call");
            if (call != null) {
                CALLS.remove(call.getAsLong()).complete(text(r, "answer"));
            } else {
                pool.execute(() -> serve(r));
            }
        }
        Runtime.getRuntime().halt(0);
    }
}
